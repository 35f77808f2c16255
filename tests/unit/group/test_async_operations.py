"""Asynchronous operations: issue order, `Work`, and the end of a group."""

import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from paceline._base.work import Lane
from paceline._group import Group
from paceline.config import Config
from paceline.errors import ConcurrentUse, OperationTimeout, PacelineError, PeerRaised, SessionClosed
from paceline.testing import local_groups, run_ranks
from support.waiting import Background


def test_asynchronous_operations_run_in_issue_order() -> None:
    def rank(group: Group) -> Any:
        works = [group.all_reduce(np.full(1000, i + group.rank), async_op=True) for i in range(20)]
        group.barrier()  # behind all of them
        assert all(work.done() for work in works)
        assert [work.operation for work in works] == list(range(1, 21))
        assert group._core.progress().operation == 21
        return [int(work.wait()[0]) for work in works]

    assert run_ranks(3, rank) == [[3 * i + 3 for i in range(20)]] * 3


def test_synchronous_and_asynchronous_operations_mix() -> None:
    def rank(group: Group) -> Any:
        seen = []
        for i in range(30):
            work = group.broadcast(np.array([i]), root=i % group.size, async_op=True)
            if i % 3:
                seen.append(int(group.all_reduce(np.array([1]))[0]))
            seen.append(int(work.wait()[0]))
            assert work.wait() is work.wait()
        return seen

    results = run_ranks(2, rank)
    assert results[0] == results[1]


def test_the_first_operation_runs_in_the_callers_thread() -> None:
    groups = local_groups(1)
    groups[0].all_reduce(np.ones(3))
    assert not any(thread.name == "paceline-group" for thread in threading.enumerate())
    groups[0].close()


def test_calls_from_many_threads_of_one_rank_all_complete() -> None:
    (group,) = local_groups(1)
    calls = [Background(lambda i=i: int(group.all_reduce(np.array([i]))[0])) for i in range(20)]
    assert [call.result() for call in calls] == list(range(20))
    group.close()


def test_a_wait_timeout_ends_the_operation_and_names_the_awaited_rank() -> None:
    groups = local_groups(2, Config(failure_timeout=0.3))
    work = groups[0].all_reduce(np.ones(4), async_op=True)
    behind = groups[0].all_reduce(np.ones(4), async_op=True)
    with pytest.raises(OperationTimeout, match=r"all_reduce op=sum float64\[4\]: rank 0 .* for rank 1") as caught:
        work.wait(0.02)
    assert caught.value.ranks == (1,)
    assert caught.value.operation == 1
    assert work.done()
    for later in (behind.wait, groups[0].barrier, groups[1].barrier):
        with pytest.raises(OperationTimeout, match=r"float64\[4\]"):
            later()
    for group in groups:
        group.close()


def test_progress_shows_the_operation_that_a_member_has_reached() -> None:
    (group,) = local_groups(1)
    assert group._core.progress()[0::2] == (0, False)
    group.barrier()
    operation, since, inside = group._core.progress()
    assert (operation, inside) == (1, False)
    assert since > 0
    group.close()


def test_closing_aborts_an_operation_that_cannot_end() -> None:
    groups = local_groups(2)
    work = groups[0].all_reduce(np.ones(4), async_op=True)
    groups[0].close(0.02)
    with pytest.raises(PeerRaised, match="closed"):
        work.wait()
    with pytest.raises(PeerRaised):
        groups[1].barrier()
    groups[1].close()


def test_a_closed_group_raises_session_closed() -> None:
    (group,) = local_groups(1)
    group.close()
    group.close()
    with pytest.raises(SessionClosed):
        group.barrier()
    with pytest.raises(SessionClosed):
        group.all_reduce(np.ones(2), async_op=True)


def test_a_group_refuses_another_thread_until_it_is_handed_over() -> None:
    """Even if the two never meet: on another rank they may have come in the other order, and equal shapes would mix."""
    groups = local_groups(2, Config(failure_timeout=0.3))
    works = [group.all_reduce(np.ones(1), async_op=True) for group in groups]
    assert [work.wait()[0] for work in works] == [2, 2]
    found: list[Any] = []

    def other(call: Any) -> None:
        try:
            found.append(call())
        except PacelineError as error:
            found.append(error)

    def in_another_thread(*calls: Any) -> list[Any]:
        found.clear()
        threads = [threading.Thread(target=other, args=(call,), name="other") for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    for group in groups:
        group.hand_over()
    assert in_another_thread(*(group.barrier for group in groups)) == [None, None]
    works = [group.all_reduce(np.ones(1), async_op=True) for group in groups]  # that thread has ended
    assert [work.wait()[0] for work in works] == [2, 2]
    (error,) = in_another_thread(groups[0].barrier)
    assert isinstance(error, ConcurrentUse)
    assert "'other'" in str(error)
    assert "'MainThread'" in str(error)
    with pytest.raises(PeerRaised, match=r"operation 3.*ConcurrentUse"):
        groups[1].barrier()
    for group in groups:
        group.close()


def test_an_interrupt_at_any_line_keeps_the_group_or_ends_the_generation() -> None:
    """Ctrl-C between any two lines of the way of a call: what was not told to the others must not look as if it was."""
    total = 0
    for at in range(1, 400):
        seen = 0

        def trace(frame: Any, event: str, argument: Any, at: int = at) -> Any:
            nonlocal seen
            if "work.py" in frame.f_code.co_filename or "core.py" in frame.f_code.co_filename:
                if event == "line":
                    seen += 1
                    if seen == at:
                        sys.settrace(None)
                        raise KeyboardInterrupt
                return trace
            return None

        groups = local_groups(2, Config(failure_timeout=0.3, step_timeout=5.0))
        other = threading.Thread(target=_until_it_fails, args=(groups[1],))
        other.start()
        interrupted = False
        sys.settrace(trace)
        try:
            groups[0].all_reduce(np.ones(4))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        ended: PacelineError | None = None
        try:
            for _ in range(3):
                assert groups[0].all_reduce(np.ones(4)).tolist() == [2] * 4
        except PacelineError as error:
            ended = error
        assert ended is None or isinstance(ended, PeerRaised), f"after line {at}: {ended}"
        assert ended is None or ended.ranks == (0,)
        groups[0].close(0.2)
        other.join(5.0)
        assert not other.is_alive(), f"after line {at}"
        groups[1].close(0.2)
        total += interrupted
        if not interrupted:
            break
    assert total > 50


def _until_it_fails(group: Group) -> None:
    with suppress(PacelineError):
        while True:
            group.all_reduce(np.ones(4))


def test_a_group_that_cannot_start_a_thread_fails_and_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "paceline-group" and threading.current_thread().name == "rank-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    def rank(group: Group) -> Any:
        kind = RuntimeError if group.rank == 1 else PeerRaised
        with pytest.raises(kind, match="can't start new thread"):
            group.all_reduce(np.ones(3), async_op=True).wait()
        group._core.flush()
        group.close()  # nothing is in line that will never run
        return str(group._core.mesh.fault.own_error)

    assert run_ranks(2, rank, timeout=20.0) == ["None", "can't start new thread"]


def test_a_failure_of_the_groups_thread_ends_all_queued_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    end_turn, in_lane = Lane._end_turn, threading.Event()

    def fail(lane: Lane) -> None:
        if threading.current_thread().name == "paceline-group":
            assert in_lane.wait(20.0)
            raise MemoryError("planted")
        end_turn(lane)

    monkeypatch.setattr(Lane, "_end_turn", fail)

    def rank(group: Group) -> Any:
        works = [group.all_reduce(np.ones(3), async_op=True) for _ in range(3)]
        in_lane.set()
        ended = []
        for work in works:
            try:
                work.wait()
            except MemoryError as error:
                ended.append(str(error))
        group.close()
        return ended, str(group._core.mesh.fault.own_error)

    (found,) = run_ranks(1, rank, timeout=20.0)
    assert found == (["planted"] * 2, "planted")
