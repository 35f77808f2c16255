"""Runs of a state taken from members over real sockets: through shared memory or not, whoever dies, lies or hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline._base.rpc import CHANNEL_OPTIONS, grpc
from paceline._base.waits import loop_thread
from paceline._elastic import parcel as parcels
from paceline._elastic import peer_calls as taking
from paceline._elastic.offer import Content, OfferedState
from paceline._elastic.parcel import Parcel, borrow, unpack
from paceline._elastic.peer_calls import Holder, RunLimits, take_shards
from paceline._elastic.reshard_plan import ElementRun, ReshardPlan, checksum
from paceline._links import grpc_state
from paceline._links.base import Peer
from paceline._links.grpc_door import Door
from paceline._links.shm.arena import arena
from paceline._links.shm.segment import SegmentError
from paceline._session.identity import process_identity
from paceline.checkpoint.pieces import Shard
from paceline.credentials import IN_THE_CLEAR
from paceline.errors import LinkUnavailable, PacelineError
from paceline_protocol import WHOLE, Share, Tag
from pacelinepb.v1 import peer_pb2, session_pb2

JOB, TAG = "job", Tag(2, 5)
PATIENCE = 8.0
SHORT = 2.0
"""Patience with one that keeps silent; a busy machine may hold up the others for a while."""
HERE = process_identity()
VALUES = {
    "large": np.random.default_rng(0).standard_normal((50_000, 3)),
    "small": np.arange(7, dtype=np.int8),
    "none": np.zeros((0, 3)),
}


def part_of(share: Share, name: str) -> tuple[int, int]:
    """First element, and how many: each array is cut by itself."""
    size = VALUES[name].size
    part = -(-size // share.parts)
    start = min(share.part * part, size)
    return start, min(part, size - start)


def cut(share: Share) -> dict[str, Shard]:
    found = {}
    for name, values in VALUES.items():
        start, count = part_of(share, name)
        found[name] = Shard(values.reshape(-1)[start : start + count].copy(), start, values.shape)
    return found


class Giver(OfferedState):
    """A member with a door, that holds a share.

    Attributes:
        asked: runs that were asked of it.
        befalls: called before a parcel is packed; what it returns is given in its stead.
    """

    def __init__(self, rank: int, share: Share) -> None:
        super().__init__()
        self.share = share
        self.asked: list[ElementRun] = []
        self.befalls: Callable[[], Any] = lambda: None
        self.door = Door(JOB, IN_THE_CLEAR)
        port = loop_thread().run(self.door.start("127.0.0.1", 0))
        self.door.window.member_id = f"member-{rank}"
        self.door.window.source = self
        self.peer = Peer(rank, f"member-{rank}", f"host-{rank}", f"127.0.0.1:{port}", HERE.pid, "", HERE.start_ticks)
        self.offer(TAG, Content.of(dict(cut(share))))

    def pack(self, tag: Tag, runs: Sequence[tuple[str, int, int]], most_bytes: int) -> Any:
        self.asked += [ElementRun(*run) for run in runs]
        instead = self.befalls()
        return super().pack(tag, runs, most_bytes) if instead is None else instead


@pytest.fixture
def givers() -> Iterator[Callable[..., list[Giver]]]:
    made: list[Giver] = []

    def make(*shares: Share) -> list[Giver]:
        made.extend(Giver(rank, share) for rank, share in enumerate(shares, len(made)))
        return made

    yield make
    for giver in made:
        loop_thread().run(giver.door.close(0.0))


@pytest.fixture(params=["lent", "sent"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the taker can map the givers' memory."""
    if request.param == "sent":
        elsewhere = session_pb2.ProcessIdentity(node="another machine", pid_namespace=1)
        monkeypatch.setattr(taking, "process_identity", lambda: elsewhere)
    return str(request.param)


def plan_for(share: Share) -> ReshardPlan:
    targets = {name: Shard(np.full(part_of(share, name)[1], 7, values.dtype), part_of(share, name)[0], values.shape)
               for name, values in VALUES.items()}  # fmt: skip
    wanted = [ElementRun(name, shard.start, shard.values.size) for name, shard in targets.items() if shard.values.size]
    return ReshardPlan(
        share, False, targets, wanted, lambda parts: {name: (0, part_of(Share(0, parts), name)[1]) for name in VALUES},
        lambda: _back,
    )  # fmt: skip


def _back() -> None:
    return


def take(plan: ReshardPlan, holders: Sequence[Giver], patience: float = PATIENCE, **more: Any) -> None:
    named = [Holder(giver.peer, [giver.share]) for giver in holders]
    taking = take_shards(JOB, TAG, named, plan, patience, IN_THE_CLEAR, **more)
    loop_thread().run(asyncio.wait_for(taking, 20))


def check(plan: ReshardPlan) -> None:
    assert plan.wanted == []
    for name, values in VALUES.items():
        start, count = part_of(plan.share, name)
        if count:
            np.testing.assert_array_equal(
                plan.into(ElementRun(name, start, count)), values.reshape(-1)[start : start + count]
            )


def test_each_holder_sends_only_elements_of_its_share(givers: Any, way: str) -> None:
    holders = givers(*(Share(part, 4) for part in range(4)))
    sizes: list[int] = []
    for part in range(3):
        plan = plan_for(Share(part, 3))
        take(plan, holders, received=sizes.append)
        check(plan)
    assert sum(sizes) == sum(values.nbytes for values in VALUES.values())
    assert all(giver.asked for giver in holders)
    start, count = part_of(holders[3].share, "large")
    assert all(start <= run.start < run.start + run.count <= start + count
               for run in holders[3].asked if run.name == "large")  # fmt: skip


def test_shards_on_the_same_machine_are_read_from_lent_memory(givers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    borrowed = []
    monkeypatch.setattr(taking, "borrow", lambda lent, size, giver: borrowed.append(size) or borrow(lent, size, giver))
    plan = plan_for(Share(0, 2))
    take(plan, givers(WHOLE))
    check(plan)
    assert sum(borrowed) == 75_000 * 8 + 4


def test_replicas_share_the_work(givers: Any, way: str) -> None:
    holders = givers(*(Share(part, 2) for part in (0, 1, 0, 1)))
    plan = plan_for(WHOLE)
    take(plan, holders, limits=RunLimits(parcel_bytes=100_000))
    check(plan)
    asked = [sum(run.count for run in giver.asked) for giver in holders]
    assert sum(asked) == sum(values.size for values in VALUES.values())
    assert sum(map(bool, asked)) >= 2


@pytest.mark.parametrize(("limit", "most"), [("runs", 1), ("name_bytes", 40), ("parcel_bytes", 5_000)])
def test_request_limits_split_a_take_into_many_calls(givers: Any, way: str, limit: str, most: int) -> None:
    plan = plan_for(Share(1, 3))
    holders = givers(Share(0, 2), Share(1, 2))
    take(plan, holders, limits=RunLimits(**{limit: most}))
    check(plan)
    assert max(run.count * 8 for giver in holders for run in giver.asked) <= max(5_000, most * 1 << 20)


def _dead(giver: Giver) -> None:
    loop_thread().run(giver.door.close(0.0))


def _refuses(giver: Giver) -> None:
    giver.withdraw()


def _withdraws(giver: Giver) -> None:
    real = giver._get

    def gone_after(tag: Tag) -> Content:
        content = real(tag)
        giver.withdraw()
        return content

    giver._get = gone_after  # type: ignore[method-assign]


def _lies(giver: Giver) -> None:
    def damaged() -> Parcel:
        wrong = Parcel([np.zeros(10)])
        wrong.data = memoryview(bytes(sum(run.count * VALUES[run.name].itemsize for run in giver.asked)))
        return wrong

    giver.befalls = damaged


def _was_asked_for_something_else(giver: Giver) -> None:
    """A number in the request has changed on the way: what is sent is whole, and not what was wanted."""

    def other() -> Parcel:
        size = sum(run.count * VALUES[run.name].itemsize for run in giver.asked)
        return Parcel([np.zeros(size, np.uint8)], checksum([replace(run, start=run.start + 1) for run in giver.asked]))

    giver.befalls = other


def _cuts_short(giver: Giver) -> None:
    giver.befalls = lambda: Parcel([np.zeros(1)])


def _holds_something_else(giver: Giver) -> None:
    giver.offer(TAG, Content.of(dict(cut(Share(6, 7)))))


TROUBLES = [_dead, _refuses, _withdraws, _lies, _was_asked_for_something_else, _cuts_short, _holds_something_else]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_other_holders_fill_in_for_a_faulty_holder(givers: Any, way: str, trouble: Any) -> None:
    holders = givers(Share(0, 2), Share(1, 2), WHOLE)
    trouble(holders[1])
    plan = plan_for(Share(1, 2))
    take(plan, holders, SHORT)
    check(plan)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_error_names_elements_that_no_holder_sends(givers: Any, way: str, trouble: Any) -> None:
    holders = givers(Share(0, 2), Share(1, 2))
    trouble(holders[1])
    plan = plan_for(Share(1, 3))
    with pytest.raises(
        LinkUnavailable, match=r"no member sent elements \d+ to \d+ of (large|small) of the state"
    ) as caught:
        take(plan, holders, SHORT)
    assert str(holders[1].peer) in str(caught.value)
    assert plan.wanted, "it is still to be filled"


def test_elements_without_a_named_holder_raise_link_unavailable(givers: Any) -> None:
    with pytest.raises(LinkUnavailable, match="none of the members named by the coordinator has it"):
        take(plan_for(WHOLE), givers(Share(1, 2)))


def test_a_silent_holder_is_replaced_by_another(givers: Any) -> None:
    (one, other) = givers(WHOLE, Share(0, 2))
    end = threading.Event()
    one.befalls = lambda: end.wait(20) and None
    plan = plan_for(Share(0, 2))
    began = time.monotonic()
    take(plan, [one, other], SHORT)
    end.set()
    check(plan)
    assert time.monotonic() - began < 15


def test_values_are_sent_if_lent_memory_cannot_be_opened(givers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(lent: Any, size: int, giver: Peer) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(taking, "borrow", closed)
    plan = plan_for(Share(0, 2))
    take(plan, givers(WHOLE))
    check(plan)


def test_borrow_refuses_invalid_lent_memory() -> None:
    lent = Parcel([np.ones(100_000)]).lend(HERE)
    assert lent is not None
    me = Peer(0, "me", "here", pid=HERE.pid, start_ticks=HERE.start_ticks)

    def refusal(kind: type[Exception], words: str, giver: Peer = me, **odd: int) -> None:
        named = peer_pb2.LentMemory(pid=lent.pid, descriptor=lent.descriptor, size=lent.size)
        for name, value in odd.items():
            setattr(named, name, value)
        with pytest.raises(kind, match=words):
            borrow(named, 1, giver)

    refusal(SegmentError, "does not lie", offset=lent.size)
    refusal(SegmentError, "bytes, not", size=lent.size + 4096)
    refusal(OSError, "No such file", descriptor=1 << 30)


@pytest.mark.parametrize("field", ["node", "pid_namespace"])
def test_memory_is_not_lent_to_another_machine_or_pid_namespace(field: str) -> None:
    there = process_identity()
    setattr(there, field, "other" if field == "node" else 1)
    assert Parcel([np.ones(100_000)]).lend(there) is None


def test_small_or_unshared_memory_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Parcel([np.ones(10)]).lend(process_identity()) is None
    monkeypatch.setattr(parcels.arena(), "find", lambda address, nbytes: None)
    assert Parcel([np.ones(100_000)]).lend(process_identity()) is None


def test_lent_memory_is_released_when_the_call_ends(givers: Any) -> None:
    before = len(arena().segments)
    holders = givers(WHOLE)
    for _ in range(8):
        take(plan_for(WHOLE), holders)
    assert len(arena().segments) <= before + 1


def test_a_parcel_with_a_wrong_checksum_is_refused() -> None:
    parcel = Parcel([np.arange(5.0), np.arange(3, dtype=np.int8)])
    into = [np.zeros(5), np.zeros(3, np.int8)]
    unpack(parcel.data, parcel.crc, into)
    assert into[0].tolist() == [0, 1, 2, 3, 4]
    assert into[1].tolist() == [0, 1, 2]
    with pytest.raises(PacelineError, match="wrong checksum"):
        unpack(parcel.data, parcel.crc ^ 1, into)


@pytest.mark.parametrize(
    "runs",
    [
        [("other", 0, 1)], [("small", 7, 1)], [("small", 0, 8)], [("small", 1 << 63, 1 << 63)], [("large", 0, 150_001)],
        [("large", 0, 150_000)] * 30, [("small", 0, 1)] * 1025,
    ],
)  # fmt: skip
def test_a_door_refuses_runs_beyond_its_arrays_or_limits(givers: Any, runs: Any) -> None:
    (giver,) = givers(WHOLE)
    assert 30 * VALUES["large"].nbytes > grpc_state.MAX_PARCEL_BYTES
    taker = taking._ShardFetcher(JOB, TAG, plan_for(WHOLE), PATIENCE)

    async def ask() -> None:
        channel = IN_THE_CLEAR.member_channel(giver.peer.address, options=CHANNEL_OPTIONS)
        request = peer_pb2.GetRunsRequest(job=JOB, to_member=giver.peer.member_id, tag=taking.wire_tag(TAG))
        for name, start, count in runs:
            request.runs.add(array=name, start=start, count=count)
        try:
            await taker._call(channel, giver.peer, request, [])
        finally:
            await channel.close(None)

    with pytest.raises(grpc.RpcError, match=r"does not have|at a time|at most 1,024 entries"):
        loop_thread().run(ask())
