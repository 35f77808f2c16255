"""What must hold where the reference, and systems like it, go wrong: a regression test or more for each known defect.

Numbers are those of the reference's list of weaknesses. What other tests hold already:

1   issue order, `Work`: unit/test_group_order; frames of a generation that is over: integration/test_grpc_door.
2   over local links, worlds of 2, 3 and 5: unit/test_group_mismatch; processes: integration/test_failures.
3   a frame that is wrong in any way ends the generation: unit/test_group_failure.
4   a failure at every single frame is the same error on every rank: unit/test_group_failure; over gRPC with the
    coordinator's verdict: integration/test_failures.
6   of processes, by SIGKILL and SIGSTOP, and while nobody communicates: integration/test_failures.
8   unit/test_group_values, test_reference_rows.
10  every dtype and op against NumPy: unit/test_group_values, unit/collectives/test_ops.
13  overlap and segments: unit/collectives/test_program.
20  strangers, wrong tickets, garbage, what is too long: integration/test_grpc_door, unit/links/test_frame; two that
    claim one rank: integration/test_coordinator_sessions.
21  arrays of the other byte order, alone: unit/test_group_messages, unit/test_group_values.
23  the recorder by itself: unit/test_recorder; records of processes: integration/test_flight_records.
24  what README.md says is run: integration/test_readme.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from paceline._collectives import exchange
from paceline._group import Group
from paceline._links import grpc_mesh
from paceline._links.frame import Frame
from paceline._links.grpc_mesh import dial
from paceline.errors import (
    CollectiveMismatch,
    OperationTimeout,
    PeerBrokeProtocol,
    PeerRaised,
)
from paceline.testing import local_groups, next_generation, run_groups
from support.reference import MIB, Background, X, every
from support.worlds import SOON, errors_over, run_over, scheduled, world_over

# Over gRPC these have pytest.mark.slow (support.worlds.EACH_LINK).

# 1. Untagged channels: two collectives in flight swapped data silently (269 of 300 runs of a prefetch were wrong, and
# 247 of 300 of an overlapped gradient sync), and a message that came late was taken by the next collective.


@pytest.mark.parametrize("world", [2, 3])
def test_1_collectives_of_one_size_in_flight_keep_their_data(world: int, link: str) -> None:
    def rank(group: Group) -> None:
        for turn in range(10):
            gathers = [group.all_gather(np.full(5, 10 * i + group.rank + turn), async_op=True) for i in range(4)]
            sums = [group.all_reduce(np.full(5, i + turn), async_op=True) for i in range(4)]
            for i in reversed(range(4)):
                expected = np.repeat([10 * i + peer + turn for peer in range(world)], 5)
                np.testing.assert_array_equal(gathers[i].wait(), expected)
                np.testing.assert_array_equal(sums[i].wait(), [world * (i + turn)] * 5)

    run_over(link, world, rank)


def test_1_overlapping_groups_messages_and_barriers_share_no_stream(link: str) -> None:
    """All at once, all of one size: the view, parts of it in threads of their own, messages in both directions."""

    def rank(group: Group) -> None:
        me = group.rank
        whole = group.subgroup(range(3), name="whole")
        pair = group.subgroup([0, 1]) if me < 2 else group.subgroup([2])

        def in_part(part: Group, base: int) -> None:
            for turn in range(10):
                expected = sum(base + peer for peer in part.ranks) + part.size * turn
                assert int(part.all_reduce(np.array([base + me + turn]))[0]) == expected
                part.barrier()

        def in_messages() -> None:
            for turn in range(10):
                group.send(np.array([1000 * me + turn]), (me + 1) % 3)
                got, source = group.recv((me + 2) % 3)
                assert (int(got[0]), source) == (1000 * source + turn, (me + 2) % 3)

        others = [
            Background(lambda: in_part(whole, 100)),
            Background(lambda: in_part(pair, 200)),
            Background(in_messages),
        ]
        in_part(group, 300)
        for other in others:
            other.result()

    run_over(link, 3, rank)


def test_1_after_a_timeout_no_later_call_takes_the_late_message(link: str) -> None:
    """By the reference rank 0's second sum was 10 + 2: rank 1's late 10 of the first was taken for it."""
    with world_over(link, 2) as groups:
        with pytest.raises(OperationTimeout):
            groups[0].all_reduce(np.array([1.0]), timeout=0.05)
        late = Background(lambda: groups[1].all_reduce(np.array([10.0])))
        with pytest.raises(OperationTimeout):
            groups[0].all_reduce(np.array([2.0]))
        with pytest.raises(OperationTimeout):
            late.result()


@every("all_reduce")
def test_1_what_comes_late_from_a_generation_that_is_over_is_dropped(schedule: str) -> None:
    groups = local_groups(2, SOON)
    for group in groups:
        group.choose = scheduled("all_reduce")[schedule]
    with pytest.raises(OperationTimeout):
        groups[1].all_reduce(np.full(3, 10.0), timeout=0.05)  # rank 1's 10 is on its way
    next_generation(groups)
    assert [result.tolist() for result in run_groups(groups, lambda g: g.all_reduce(np.full(3, 2.0)))] == [[4] * 3] * 2


def test_1_a_message_later_than_its_recv_goes_to_whoever_asks_for_its_tag(link: str) -> None:
    def rank(group: Group) -> Any:
        if group.rank == 0:
            with pytest.raises(OperationTimeout):
                group.recv(1, tag=1, timeout=0.02)
            group.barrier()
            second = int(group.recv(1, tag=2)[0])
            return second, int(group.recv(1, tag=1)[0]), int(group.all_reduce(np.int64(5)))
        group.barrier()
        group.send(np.int64(1), 0, tag=1)
        group.send(np.int64(2), 0, tag=2)
        group.all_reduce(np.int64(6))
        return None

    assert run_over(link, 2, rank)[0] == (2, 1, 11)


# 2. Op, dtype, shape, root and order were never compared: [2,2] with [4], and a sum with a mean, passed silently.

DISAGREE: dict[str, tuple[Callable[[Group], object], Callable[[Group], object], str, str]] = {
    "op": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X, op="mean"), "op=sum", "op=mean"),
    "shape of the same size": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X.reshape(2, 2)), "[4]", "[2,2]"),
    "one is empty": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X[:0]), "[4]", "[0]"),
    "dtype of the same size": (
        lambda g: g.all_reduce(X),
        lambda g: g.all_reduce(X.view(np.int32)),
        "float32[4]",
        "int32[4]",
    ),
    "order": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X, order="rank"), "op=sum float32", "order=rank"),
    "root of a broadcast": (
        lambda g: g.broadcast(X, root=0),
        lambda g: g.broadcast(X, root=1),
        "root=0",
        "root=1",
    ),
    "root of a reduce": (lambda g: g.reduce(X, root=0), lambda g: g.reduce(X, root=1), "root=0", "root=1"),
    "root of a gather": (lambda g: g.gather(X, root=0), lambda g: g.gather(X, root=1), "root=0", "root=1"),
    "root of a scatter": (
        lambda g: g.scatter([X, X], root=0),
        lambda g: g.scatter([X, X], root=1),
        "root=0",
        "root=1",
    ),
    "op of a reduce_scatter": (
        lambda g: g.reduce_scatter(X),
        lambda g: g.reduce_scatter(X, op="mean"),
        "op=sum",
        "op=mean",
    ),
    "length of an all_gather": (lambda g: g.all_gather(X), lambda g: g.all_gather(X[:3]), "[4]", "[3]"),
    "evenness of an all_gather": (
        lambda g: g.all_gather(X),
        lambda g: g.all_gather(X, uneven=True),
        "all_gather float32",
        "rows=any",
    ),
    "dtype of an all_to_all": (
        lambda g: g.all_to_all(X),
        lambda g: g.all_to_all(X.view(np.int32)),
        "float32[4]",
        "int32[4]",
    ),
    "counts of an all_to_all": (
        lambda g: g.all_to_all(X),
        lambda g: g.all_to_all(X, send_counts=[2, 2]),
        "all_to_all float32[4]",
        "counts=any",
    ),
    "collective": (lambda g: g.all_gather(X), lambda g: g.all_reduce(X), "all_gather", "all_reduce"),
    "a barrier": (lambda g: g.barrier(), lambda g: g.all_reduce(X), "barrier", "all_reduce"),
    "asynchronous": (
        lambda g: g.all_reduce(X, async_op=True).wait(),
        lambda g: g.all_reduce(X, op="max", async_op=True).wait(),
        "op=sum",
        "op=max",
    ),
}


@pytest.mark.parametrize("name", DISAGREE)
def test_2_ranks_that_disagree_are_told_both_sides(name: str, link: str) -> None:
    first, second, one, two = DISAGREE[name]

    def call(group: Group) -> None:
        (second if group.rank else first)(group)
        group.barrier()

    with mock.patch("paceline._collectives.exchange.PATIENCE", 0.05):
        raised = errors_over(link, 2, call)
    for error in raised:
        assert isinstance(error, CollectiveMismatch), raised
        for fact in (one, two, "rank 0", "rank 1"):
            assert fact in str(error)
        assert error.ranks
        assert set(error.ranks) <= {0, 1}
        assert (error.operation, error.generation) == (1, 1)


def test_2_ranks_that_disagree_are_told_though_their_links_are_slow_to_come(
    link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has sent anything, and what each has to say cannot go out at first."""

    async def late(*arguments: Any) -> Any:
        await asyncio.sleep(0.2)
        return await dial(*arguments)

    monkeypatch.setattr(grpc_mesh, "dial", late)
    monkeypatch.setattr(exchange, "PATIENCE", 0.05)
    for error in errors_over(link, 2, lambda group: group.gather(X, root=group.rank)):
        assert isinstance(error, CollectiveMismatch)


def test_2_counts_that_do_not_fit_name_the_rank_that_sends_others(link: str) -> None:
    def call(group: Group) -> None:
        group.all_to_all(X, send_counts=[2, 2], recv_counts=[2, 3] if group.rank else [2, 2])
        group.barrier()

    for error in errors_over(link, 2, call):
        assert isinstance(error, CollectiveMismatch)
        assert "2 rows" in str(error)
        assert "expects 3" in str(error)


# 3. After a wrong length or a timeout in the middle of a frame the stream was out of step, and stayed in use.


def test_3_a_send_that_times_out_half_way_leaves_the_link_in_step(link: str) -> None:
    sent = threading.Event()

    def rank(group: Group) -> Any:
        if group.rank == 0:
            with pytest.raises(OperationTimeout, match=r"rank 1 .*did not take"):
                group.send(np.zeros(80 * MIB, np.uint8), 1, timeout=0.2)
            sent.set()
            group.send(np.int64(5), 1)
            return int(group.all_reduce(np.int64(1)))
        assert sent.wait(20)
        return int(group.recv(0)[0]), int(group.all_reduce(np.int64(1)))

    assert run_over(link, 2, rank) == [2, (5, 2)]


def test_3_a_recv_that_times_out_half_way_leaves_the_link_in_step(link: str) -> None:
    whole, go = np.arange(MIB, dtype=np.int32), threading.Event()  # 4 frames

    def hold(way: str, peer: int, frame: Frame) -> Frame:
        if way == "send" and frame.part == 2:
            assert go.wait(20)
        return frame

    def rank(group: Group) -> Any:
        if group.rank == 0:
            group.send(whole, 1)
            group.send(np.int32(7), 1)
            return None
        with pytest.raises(OperationTimeout):
            group.recv(0, timeout=0.1)  # some frames are there, the rest is not
        go.set()
        np.testing.assert_array_equal(group.recv(0)[0], whole)
        return int(group.recv(0)[0])

    with world_over(link, 2, tamper={0: hold}) as groups:
        assert run_groups(groups, rank)[1] == 7


@pytest.mark.parametrize("cut", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""])
def test_3_a_length_that_is_wrong_ends_the_generation_for_good(cut: Callable[[bytes], bytes], link: str) -> None:
    def shorten(way: str, peer: int, frame: Frame) -> Frame:
        if way == "send" and len(frame.payload):
            frame.payload = cut(bytes(frame.payload))
        return frame

    def rank(group: Group) -> None:
        for _ in range(2):  # the second finds nothing to go on with
            with pytest.raises(PeerBrokeProtocol) as caught:
                group.all_reduce(X, order="rank")  # rank 0 answers what it has understood
            assert caught.value.ranks == (1,)

    with world_over(link, 2, tamper={1: shorten}) as groups:
        run_groups(groups, rank)


# 4. Failures were not collective: some ranks succeeded, some timed out; nothing was poisoned.


def test_4_all_that_is_in_flight_fails_with_one_error_and_so_does_all_that_follows(link: str) -> None:
    def fail(way: str, peer: int, frame: Frame) -> Frame:
        raise ZeroDivisionError("in the code of rank 1")

    issued = threading.Barrier(3)

    def rank(group: Group) -> None:
        if group.rank == 1:
            issued.wait(20)
            with pytest.raises(ZeroDivisionError):
                group.all_reduce(X)
            with pytest.raises(PeerRaised, match="ZeroDivisionError"):
                group.all_reduce(X)
            return
        works = [group.all_reduce(X, async_op=True) for _ in range(3)]
        issued.wait(20)
        calls: list[Callable[[], object]] = [*(work.wait for work in works), group.barrier]
        calls += [lambda: group.send(X, 0), lambda: group.recv(0, timeout=0), lambda: group.subgroup([group.rank])]
        texts = set()
        for call in calls:
            with pytest.raises(PeerRaised, match="ZeroDivisionError") as caught:
                call()
            texts.add(str(caught.value))
            assert (caught.value.ranks, caught.value.operation, caught.value.generation) == ((1,), 1, 1)
        assert len(texts) == 1

    with world_over(link, 3, tamper={1: fail}) as groups:
        run_groups(groups, rank)
