"""The contracts and edge cases of the reference's backends, rings and collectives that no vector holds, on every link.

Where its rows cannot all hold: roots and ranks are checked at world size 1 too; sending to oneself and a world of one
work on every link; parameters keep their shape. One difference is deliberate: all_gather of a 0-d array gives shape [W]
at W = 1 too. Elsewhere: the chunks of (8,4), (7,4) and the tree as arithmetic are in `unit/collectives/test_schedules`,
all_reduce against NumPy in `unit/test_group_values`, messages in `unit/test_group_messages`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline import errors
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline.errors import InvalidRank, InvalidWorldSize, OperationTimeout, SizeMismatch
from support.worlds import EACH_LINK, run_over, scheduled, world_over

# Over gRPC these have pytest.mark.slow (support.worlds.EACH_LINK).

SOON_S = 5.0
"""For a timeout of 0.05 s to be over on a busy machine; the group's own is minutes."""


@pytest.fixture(params=EACH_LINK)
def link(request: pytest.FixtureRequest) -> str:
    """A kind of link; each test that asks for it runs over every one."""
    return str(request.param)


def f4(*values: float) -> Any:
    return np.array(values, np.float32)


def every(collective: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("schedule", SCHEDULES[collective])


# Errors: which kind, and what it is besides.


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.InvalidWorldSize, ValueError),
        (errors.InvalidRank, ValueError),
        (errors.SizeMismatch, ValueError),
        (errors.PeerLost, ConnectionError),
        (errors.OperationTimeout, TimeoutError),
        (errors.UnsupportedOp, TypeError),
        (errors.CoordinatorUnreachable, ConnectionError),
        (errors.LinkUnavailable, Exception),
    ],
)
def test_every_kind_of_the_reference_is_a_type(kind: type[errors.PacelineError], builtin: type) -> None:
    assert issubclass(kind, errors.PacelineError)
    assert issubclass(kind, builtin)
    raised = kind("what", ranks=(1,), operation=2, generation=3)
    assert (raised.ranks, raised.operation, raised.generation) == ((1,), 2, 3)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_and_roots_outside_the_world_are_invalid_at_every_world_size(world: int, link: str) -> None:
    x = f4(1, 2)

    def rank(group: Group) -> None:
        for bad in (-1, world, world + 4):
            calls: list[Callable[[], object]] = [
                lambda bad=bad: group.broadcast(x, root=bad),
                lambda bad=bad: group.reduce(x, root=bad),
                lambda bad=bad: group.gather(x, root=bad),
                lambda bad=bad: group.scatter([x] * world, root=bad),
                lambda bad=bad: group.broadcast_object("x", root=bad),
                lambda bad=bad: group.gather_object("x", root=bad),
                lambda bad=bad: group.send(x, bad),
                lambda bad=bad: group.recv(bad),
                lambda bad=bad: group.global_rank(bad),
                lambda bad=bad: group.subgroup([group.rank, bad]),
            ]
            for call in calls:
                with pytest.raises(InvalidRank, match=rf"{bad} .*world of {world}"):
                    call()
        group.barrier()  # mistakes at the call have cost nothing

    run_over(link, world, rank)


# Backends: messages, timeouts, subgroups, barriers.


@pytest.mark.parametrize("world", [1, 2])
def test_sending_to_oneself_works(world: int, link: str) -> None:
    def rank(group: Group) -> Any:
        group.send(np.array([7], np.uint8), group.rank)
        received, source = group.recv(group.rank)
        return received.tolist(), source

    assert run_over(link, world, rank) == [([7], rank) for rank in range(world)]


def test_every_rank_reaches_every_other(link: str) -> None:
    """There is no star: workers talk to each other."""

    def rank(group: Group) -> list[int]:
        for peer in range(group.size):
            group.send(np.int64(10 * group.rank + peer), peer)
        return [int(group.recv(peer)[0]) for peer in range(group.size)]

    assert run_over(link, 4, rank) == [[10 * source + me for source in range(4)] for me in range(4)]


def test_messages_of_one_pair_are_first_in_first_out_and_may_be_empty(link: str) -> None:
    def rank(group: Group) -> list[int]:
        if group.rank == 0:
            for size in (3, 0, 5, 0, 1):
                group.send(np.zeros(size, np.uint8), 1)
            return []
        return [group.recv(0)[0].size for _ in range(5)]

    assert run_over(link, 2, rank)[1] == [3, 0, 5, 0, 1]


def test_a_message_of_another_size_is_a_mismatch_and_the_next_is_intact(link: str) -> None:
    def rank(group: Group) -> Any:
        if group.rank == 0:
            group.send(np.arange(8, dtype=np.uint8), 1)
            group.send(np.array([5, 6], np.uint8), 1)
            return None
        with pytest.raises(SizeMismatch, match=r"\(4,\).*\(8,\)"):
            group.recv(0, out=np.zeros(4, np.uint8))
        whole = group.recv(0)[0].tolist()  # it is not lost
        return whole, group.recv(0, out=np.zeros(2, np.uint8))[0].tolist()

    assert run_over(link, 2, rank)[1] == (list(range(8)), [5, 6])


def test_the_timeout_of_a_recv_is_kept_and_told_with_its_fraction(link: str) -> None:
    with world_over(link, 2) as groups:
        for source in (1, None):
            started = time.monotonic()
            with pytest.raises(OperationTimeout, match=r"in \d\.\d+ s") as caught:
                groups[0].recv(source, timeout=0.05)
            assert 0.05 <= time.monotonic() - started < SOON_S
            assert caught.value.ranks == (() if source is None else (1,))


def test_a_timeout_of_0_takes_what_is_there_and_waits_for_nothing(link: str) -> None:
    def rank(group: Group) -> Any:
        if group.rank == 0:
            with pytest.raises(OperationTimeout):
                group.recv(1, timeout=0)
            group.send(f4(1), 1)
            group.send(f4(2), 1, tag=9)
            group.barrier()
            return None
        group.recv(0, tag=9)  # so the one before it has come
        got = group.recv(0, timeout=0)[0].tolist()
        started = time.monotonic()
        with pytest.raises(OperationTimeout):
            group.recv(0, timeout=0)
        assert time.monotonic() - started < SOON_S
        group.barrier()  # rank 0 is here until now: nothing comes, but it could
        return got

    assert run_over(link, 2, rank)[1] == [1]


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_timeout_that_is_none_is_refused_before_anything_happens(seconds: float, link: str) -> None:
    def rank(group: Group) -> float:
        for call in (
            lambda: group.recv(0, timeout=seconds),
            lambda: group.send(f4(1), 0, timeout=seconds),
            lambda: group.barrier(timeout=seconds),
            lambda: group.all_reduce(f4(1), timeout=seconds),
            lambda: group.all_reduce(f4(1), timeout=seconds, async_op=True),
        ):
            with pytest.raises(ValueError, match="timeout"):
                call()
        return float(group.all_reduce(f4(1))[0])

    assert run_over(link, 2, rank) == [2.0, 2.0]


@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"])
def test_every_collective_has_a_timeout(call: str, link: str) -> None:
    """Rank 1 comes to none of them; by the reference, broadcast and barrier had no timeout of their own."""
    with world_over(link, 2) as groups:
        arguments = () if call == "barrier" else (f4(1, 2, 3, 4),)
        rooted = {"root": 1} if call == "broadcast" else {}
        started = time.monotonic()
        with pytest.raises(OperationTimeout, match=r"waited \d\.\d+ s for rank 1") as caught:
            getattr(groups[0], call)(*arguments, timeout=0.05, **rooted)
        assert 0.05 <= time.monotonic() - started < SOON_S
        assert (caught.value.ranks, caught.value.operation) == ((1,), 1)


@pytest.mark.alone
def test_one_deadline_holds_for_a_whole_collective(link: str) -> None:
    """Not one for each receive: rank 1 comes late, rank 2 never."""
    late = threading.Event()

    def rank(group: Group) -> float:
        started = time.monotonic()
        if group.rank == 2:
            return 0.0
        if group.rank == 1:
            late.wait(0.6)
        with pytest.raises(OperationTimeout):
            group.all_reduce(f4(1), timeout=0.8)
        return time.monotonic() - started

    with world_over(link, 3, choose=scheduled("all_reduce")["star"]) as groups:
        both = run_threads([lambda g=group: rank(g) for group in groups])
    assert 0.8 <= both[0] < 1.2


def run_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Calls in a thread each; their results. Unlike `run_groups` it closes nothing: whoever is done stays."""
    results: list[Any] = [None] * len(calls)
    raised: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:  # noqa: BLE001  it is raised below
            raised.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank hangs"
    if raised:
        raise raised[0]
    return results


def test_what_a_subgroup_may_not_be_is_checked_in_this_order(link: str) -> None:
    with world_over(link, 4) as groups:
        with pytest.raises(InvalidWorldSize):
            groups[1].subgroup([])
        with pytest.raises(InvalidRank, match="member 4"):
            groups[1].subgroup([0, 2, 4])  # nor is rank 1 among them
        with pytest.raises(InvalidRank, match=r"rank 1 .*\[0, 2\]"):
            groups[1].subgroup([0, 2])
        part = groups[2].subgroup([0, 2])
        for call in (lambda: part.send(f4(1), 2), lambda: part.recv(2), lambda: part.global_rank(2)):
            with pytest.raises(InvalidRank, match=r"2 .*world of 2"):
                call()
        assert groups[2].subgroup([2]).size == 1


def test_a_subgroup_of_one_works(link: str) -> None:
    def rank(group: Group) -> Any:
        part = group.subgroup([group.rank])
        part.barrier()
        part.send(f4(3), 0)
        return part.recv(0)[0].tolist(), part.all_reduce(f4(group.rank), op="mean").tolist(), part.parent is group

    assert run_over(link, 3, rank) == [([3], [rank], True) for rank in range(3)]


def test_a_subgroup_of_workers_needs_no_rank_0(link: str) -> None:
    def rank(group: Group) -> Any:
        if group.rank == 0:
            return None
        part = group.subgroup([1, 2, 3])
        return part.all_reduce(f4(group.rank)).tolist(), part.broadcast(f4(group.rank), root=2).tolist()

    assert run_over(link, 4, rank) == [None] + [([6], [3])] * 3


@every("barrier")
def test_messages_and_subgroups_do_not_disturb_a_barrier(schedule: str, link: str) -> None:
    def rank(group: Group) -> Any:
        part = group.subgroup([0, 1, 2])
        peer = (group.rank + 1) % 3
        group.send(np.array([group.rank], np.uint8), peer)  # one byte, as the reference's token
        part.send(np.array([10 + group.rank], np.uint8), peer)
        group.barrier()
        part.barrier()
        source = (group.rank + 2) % 3
        return int(group.recv(source)[0][0]), int(part.recv(source)[0][0])

    results = run_over(link, 3, rank, choose=scheduled("barrier")[schedule])
    assert results == [(source, 10 + source) for source in (2, 0, 1)]


@every("barrier")
@pytest.mark.parametrize("last", range(4))
def test_nobody_leaves_a_barrier_before_all_have_entered(last: int, schedule: str, link: str) -> None:
    left: list[int] = []

    def enter(group: Group) -> None:
        group.barrier()
        left.append(group.rank)

    with world_over(link, 4, choose=scheduled("barrier")[schedule]) as groups:
        early = [group for group in groups if group.rank != last]
        threads = [threading.Thread(target=enter, args=(group,)) for group in early]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 10
        while not all(group.progress().inside for group in early):
            assert time.monotonic() < deadline, "they do not come in"
            time.sleep(0.001)
        assert left == []
        groups[last].barrier()
        for thread in threads:
            thread.join(20)
    assert sorted(left) == [group.rank for group in early]
