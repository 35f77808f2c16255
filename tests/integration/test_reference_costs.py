"""Defects of the reference that are of time and cost: 5 and 6, timeouts and deaths; 11 to 15; 23, records.

See test_reference_defects.
"""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from typing import Any
from unittest import mock

import numpy as np
import pytest

from paceline import FSDP, ShardingStrategy, nn
from paceline._base.waits import loop_thread
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline._links.grpc_door import Door
from paceline._links.grpc_mesh import GrpcMesh
from paceline._links.local import LocalMesh
from paceline.errors import CollectiveMismatch, OperationTimeout, PeerLost
from paceline.testing import local_groups
from support.grpc_pair import grpc_world
from support.parts import at_once
from support.waiting import Background, wait_for
from support.worlds import SOON, run_over, scheduled, world_over

# Over gRPC these have pytest.mark.slow (support.worlds.EACH_LINK).

X = np.ones(4, np.float32)
MIB = 1 << 20


def states(group: Group) -> list[tuple[str, str]]:
    return [(entry["operation"], entry["state"]) for entry in group._core.recorder.snapshot()]


def talk_both_ways(groups: list[Group]) -> None:
    """So that all links are up."""
    other = Background(lambda: (groups[1].barrier(), groups[1].send(X, 0), groups[1].recv(0)))
    groups[0].barrier()
    groups[0].send(X, 1)
    groups[0].recv(1)
    groups[0].hand_over()
    other.result()


# 5. No timeout held while sending: a ring blocked for 8 s with a timeout of 0.5 s; 0 meant another thing on each
# backend; 50 ms were told as "0s"; broadcast and barrier had none.

BIG = np.zeros(64 * MIB, np.uint8)
WAITS: dict[str, Callable[[Group, float], object]] = {
    "all_reduce": lambda g, timeout: g.all_reduce(X, timeout=timeout),
    "barrier": lambda g, timeout: g.barrier(timeout=timeout),
    "broadcast": lambda g, timeout: g.broadcast(X, root=1, timeout=timeout),
    "all_gather": lambda g, timeout: g.all_gather(X, timeout=timeout),
    "reduce_scatter": lambda g, timeout: g.reduce_scatter(X, timeout=timeout),
    "recv": lambda g, timeout: g.recv(1, timeout=timeout),
    "recv from any": lambda g, timeout: g.recv(timeout=timeout),
}
FILLS: dict[str, Callable[[Group, float], object]] = {
    "broadcast": lambda g, timeout: g.broadcast(BIG, root=0, timeout=timeout),
    "all_reduce": lambda g, timeout: g.all_reduce(BIG, timeout=timeout),
    "send": lambda g, timeout: g.send(np.zeros(80 * MIB, np.uint8), 1, timeout=timeout),
}


@pytest.mark.alone
@pytest.mark.parametrize("call", FILLS)
def test_5_a_send_to_a_peer_that_does_not_receive_times_out(call: str, link: str) -> None:
    with world_over(link, 2) as groups:
        started = time.monotonic()
        with pytest.raises(OperationTimeout, match=r"[01]\.\d+ s") as caught:
            FILLS[call](groups[0], 0.5)
        assert 0.5 <= time.monotonic() - started < 10.0
        assert caught.value.ranks == (1,)


@pytest.mark.alone
@pytest.mark.parametrize("timeout", [0.0, 0.05])
@pytest.mark.parametrize("call", WAITS)
def test_5_calls_time_out_on_time_and_report_fractional_seconds(call: str, timeout: float, link: str) -> None:
    with world_over(link, 2) as groups:
        started = time.monotonic()
        with pytest.raises(OperationTimeout) as caught:
            WAITS[call](groups[0], timeout)
        assert timeout <= time.monotonic() - started < 5.0
        told = re.search(r" ([\d.e-]+) s", str(caught.value))
        assert told is not None
        assert float(told[1]) >= timeout
        assert caught.value.ranks == (() if call == "recv from any" else (1,))


def test_5_a_call_that_need_not_wait_succeeds_with_timeout_zero(link: str) -> None:
    def rank(group: Group) -> Any:
        group.send(X, group.rank, timeout=0)
        found = group.recv(group.rank, timeout=0)[0].tolist()
        return found, group.size > 1 or (group.barrier(timeout=0), group.all_reduce(X, timeout=0).tolist())

    assert run_over(link, 1, rank) == [([1] * 4, (None, [1] * 4))]
    assert run_over(link, 2, rank) == [([1] * 4, True)] * 2


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_5_a_negative_or_nan_timeout_raises_value_error(seconds: float, link: str) -> None:
    def rank(group: Group) -> float:
        for call in (
            *WAITS.values(),
            lambda g, t: g.send(X, 0, timeout=t),
            lambda g, t: g.barrier(async_op=True, timeout=t),
        ):
            with pytest.raises(ValueError, match="timeout"):
                call(group, seconds)
        return float(group.all_reduce(X)[0])

    assert run_over(link, 2, rank) == [2.0, 2.0]


@pytest.mark.alone
def test_5_one_deadline_covers_all_receives_of_a_collective(link: str) -> None:
    """Not one for each receive: rank 1 comes late, rank 2 never."""
    late = threading.Event()

    def rank(group: Group) -> float:
        started = time.monotonic()
        if group.rank == 1:
            late.wait(0.9)
        with pytest.raises(OperationTimeout):
            group.all_reduce(X, timeout=1.0)
        return time.monotonic() - started

    with world_over(link, 3, choose=scheduled("all_reduce")["star"]) as groups:
        took, _ = at_once([lambda group=group: rank(group) for group in groups[:2]])
    assert 1.0 <= took < 1.8  # with a deadline for each receive it would be 1.9


# 6. A dead peer was not seen: closure was never reported, and no read meant no news.


def die(group: Group, doors: list[Door]) -> None:
    """What the death of the member's process does to its links: they end without a word."""
    mesh = group._core.mesh
    if isinstance(mesh, LocalMesh):
        mesh.cut()
        return
    assert isinstance(mesh, GrpcMesh)
    loop_thread().run(mesh.end())
    (server,) = doors[mesh.rank]._servers
    loop_thread().run(server.stop(None))


@pytest.mark.alone
@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_6_a_blocked_call_raises_peer_lost_when_its_peer_dies(call: str, link: str) -> None:
    calls: dict[str, Callable[[Group], object]] = {
        "all_reduce": lambda g: g.all_reduce(X),
        "recv": lambda g: g.recv(1, timeout=20.0),
    }
    with ExitStack() as stack:
        doors: list[Door] = []
        if link == "local":
            groups = local_groups(2, SOON)
        else:
            made = stack.enter_context(grpc_world(2, kind=link))
            doors, groups = made.doors, [Group(mesh, SOON) for mesh in made.meshes]
        for group in groups:
            stack.callback(group.close, 0.2)
        talk_both_ways(groups)
        waiting = Background(lambda: calls[call](groups[0]))
        wait_for(lambda: states(groups[0])[-1] == (call, "running"))
        killed = time.monotonic()
        die(groups[1], doors)
        with pytest.raises(PeerLost) as caught:
            waiting.result()
        assert waiting.ended - killed < 1.0
        assert caught.value.ranks == (1,)


# 11. Two writes a frame and delayed acknowledgements: 88 ms for a star of 1 KiB, 88 ms for a barrier.


@pytest.mark.alone
@pytest.mark.parametrize("world", [2, 3])
def test_11_a_small_call_over_loopback_is_not_delayed_by_tcp_acks(world: int) -> None:
    x = np.ones(256, np.float32)

    def rank(group: Group) -> dict[str, float]:
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: group.all_reduce(x),
            "barrier": group.barrier,
            "messages": lambda: (
                group.send(x, (group.rank + 1) % world),
                group.recv((group.rank - 1) % world),
            ),
        }
        medians = {}
        for name, call in calls.items():
            call()
            took = []
            for _ in range(30):
                started = time.perf_counter()
                call()
                took.append(time.perf_counter() - started)
            medians[name] = statistics.median(took)
        return medians

    for medians in run_over("grpc", world, rank):
        assert all(median < 0.02 for median in medians.values()), medians


# 12. Rank 0 moved 2(W-1) arrays, and all others 2. 13. A new thread for each step of a ring.


@pytest.mark.parametrize("world", [2, 3, 4])
def test_12_no_rank_sends_more_than_its_share_of_a_large_array(world: int, link: str) -> None:
    x = np.ones(3 * MIB // 4, np.float32)  # 3 MiB: divisible by 2, 3 and 4
    share = x.nbytes * (world - 1) / world

    def rank(group: Group) -> dict[str, float]:
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: group.all_reduce(x),
            "in rank order": lambda: group.all_reduce(x, order="rank"),
            "reduce_scatter": lambda: group.reduce_scatter(x),
            "all_gather": lambda: group.all_gather(x[: x.size // world]),
            "all_to_all": lambda: group.all_to_all(x),
        }
        moved = {}
        for name, call in calls.items():
            before = group.bytes_sent
            call()
            moved[name] = (group.bytes_sent - before) / share
        return moved

    for moved in run_over(link, world, rank):
        assert moved == pytest.approx(
            {"all_reduce": 2, "in rank order": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}, rel=0.01
        )


@pytest.mark.parametrize("schedule", SCHEDULES["broadcast"])
def test_12_no_rank_sends_more_than_two_copies_in_a_broadcast(schedule: str) -> None:
    x = np.ones(7 * MIB // 8)

    def rank(group: Group) -> float:
        group.broadcast(x, root=0)
        return group.bytes_sent / x.nbytes

    moved = run_over("local", 8, rank, choose=scheduled("broadcast")[schedule])
    assert max(moved) <= 2.0, "not 7, as the star's root"
    assert sum(moved) == pytest.approx(7, rel=0.2)


def test_13_no_operation_starts_a_thread(link: str) -> None:
    x = np.ones(MIB // 4, np.float32)
    names: list[str] = []
    start = threading.Thread.start

    def watched(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    with world_over(link, 3) as groups:

        def work(group: Group) -> None:
            group.all_reduce(x)
            group.all_reduce(X)
            group.broadcast(x)
            group.all_gather(x)
            group.reduce_scatter(np.ones(3))
            group.all_to_all(np.ones(3))
            group.barrier()
            group.send(X, (group.rank + 1) % 3)
            group.recv((group.rank - 1) % 3)

        def in_lane(group: Group) -> None:
            for task in [group.all_reduce(x, async_op=True) for _ in range(5)]:
                task.wait()

        go = threading.Barrier(4)

        def member(group: Group) -> None:
            work(group)
            in_lane(group)  # from now on the group has its one thread
            go.wait(20)
            go.wait(20)
            for _ in range(5):
                work(group)
                in_lane(group)

        members = [Background(lambda group=group: member(group)) for group in groups]
        go.wait(20)
        with mock.patch.object(threading.Thread, "start", watched):
            go.wait(20)
            for each in members:
                each.result()
    assert names == []


# 14. One lock for both directions: a send waited 513 ms behind a receive of the same pair.


@pytest.mark.alone
def test_14_a_send_does_not_wait_behind_a_receive_on_the_same_pair(link: str) -> None:
    with world_over(link, 2) as groups:
        talk_both_ways(groups)
        waiting = Background(lambda: groups[0].recv(1, tag=3, timeout=20.0))
        wait_for(lambda: states(groups[0])[-1] == ("recv", "running"))
        started = time.monotonic()
        for _ in range(3):
            groups[0].send(np.ones(MIB // 8), 1, timeout=10.0)
        assert time.monotonic() - started < 1.0  # each waited half a second
        for _ in range(3):
            groups[1].recv(0, timeout=10.0)
        groups[1].send(np.int64(1), 0, tag=3)
        assert int(waiting.result()[0]) == 1


def test_14_a_collective_does_not_wait_behind_a_receive_on_the_same_pair(link: str) -> None:
    def rank(group: Group) -> int:
        waiting = Background(lambda: group.recv(1 - group.rank, tag=3, timeout=20.0))
        wait_for(lambda: ("recv", "running") in states(group))
        total = int(group.all_reduce(np.ones(MIB // 2, np.int32))[-1])
        group.send(np.int64(total), 1 - group.rank, tag=3)
        return int(waiting.result()[0])

    assert run_over(link, 2, rank) == [2, 2]


def test_14_two_ranks_may_both_send_large_arrays_before_receiving(link: str) -> None:
    x = np.ones(24 * MIB, np.uint8)

    def rank(group: Group) -> int:
        group.send(x, 1 - group.rank, timeout=20.0)
        return int(group.recv(1 - group.rank, timeout=20.0)[0].sum())

    assert run_over(link, 2, rank) == [x.size] * 2


# 15. Each parameter was gathered and reduced by itself. 17. HYBRID_SHARD ran over one kind of link only.


@pytest.mark.parametrize(
    ("strategy", "world", "node", "number"),
    [
        ("full_shard", 2, None, (6, 3, 2)),
        ("shard_grad_op", 2, None, (3, 3, 2)),
        ("no_shard", 2, None, (0, 0, 5)),
        ("hybrid_shard", 4, 2, (6, 3, 5)),
    ],
)
def test_15_each_fsdp_unit_is_gathered_and_reduced_by_one_collective(
    strategy: str, world: int, node: int | None, number: Any, link: str
) -> None:
    """So many all_gather, reduce_scatter and all_reduce in a step; two of these are of weights and flags."""
    x = np.random.default_rng(3).standard_normal((13, 5))

    def rank(group: Group) -> None:
        options: dict[str, Any] = {"strategy": ShardingStrategy(strategy), "intra_node_size": node}
        layers = [nn.Linear(i, o, rng=np.random.default_rng(0), dtype=np.float64) for i, o in [(5, 7), (7, 1), (1, 3)]]
        fsdp = FSDP(nn.Sequential(*(FSDP(layer, group, **options) for layer in layers)), group, **options)
        for _ in range(3):
            before = len(group._core.recorder.snapshot())
            fsdp.backward(fsdp(x[group.rank :: group.size]))
        counts = Counter(entry["operation"] for entry in group._core.recorder.snapshot()[before:])
        assert tuple(counts[name] for name in ("all_gather", "reduce_scatter", "all_reduce")) == number

    run_over(link, world, rank)


# 23. No log of operations, no counters.


def test_23_the_flight_recorder_records_every_operation(link: str) -> None:
    def rank(group: Group) -> None:
        part = group.subgroup([0, 1], name="data")
        group.all_reduce(np.ones((2, 3), np.float32), op="mean")
        part.all_gather(np.ones(5, np.int16))
        group.all_reduce(np.ones(4, np.float64), async_op=True).wait()
        group.send(np.ones(7, np.uint8), group.rank, tag=3)
        group.recv(group.rank, tag=3)
        group.barrier()
        with pytest.raises(CollectiveMismatch):
            group.all_reduce(X, op="sum" if group.rank else "max")
        entries = group._core.recorder.snapshot()
        columns = ("number", "operation", "detail", "dtype", "shape", "bytes", "state")
        assert [tuple(entry[name] for name in columns) for entry in entries if not entry["group"]] == [
            (1, "all_reduce", "op=mean", "float32", [2, 3], 24, "done"),
            (2, "all_reduce", "op=sum", "float64", [4], 32, "done"),
            (0, "send", f"to={group.rank} tag=3", "uint8", [7], 7, "done"),
            (0, "recv", f"from={group.rank} tag=3", None, None, None, "done"),
            (3, "barrier", "", None, None, None, "done"),
            (4, "all_reduce", f"op={'sum' if group.rank else 'max'}", "float32", [4], 16, "failed"),
        ]
        (of_part,) = (entry for entry in entries if entry["group"])
        assert (of_part["number"], of_part["operation"], of_part["bytes"]) == (1, "all_gather", 10)
        assert "data" in of_part["group"]
        assert entries[-1]["error"].startswith("CollectiveMismatch: operation 4")
        assert [entry["error"] for entry in entries[:-1]] == [None] * 6
        for entry in entries:
            issued, began, ended = (datetime.fromisoformat(entry[f"{at}_at"]) for at in ("issued", "began", "ended"))
            assert issued <= began <= ended
            assert entry["waited_s"] >= 0
            assert entry["took_s"] >= 0

    run_over(link, 2, rank)


def test_23_bytes_sent_are_counted(link: str) -> None:
    x = np.ones(MIB // 4, np.float32)

    def rank(group: Group) -> None:
        sent = group.bytes_sent
        group.send(x, 1 - group.rank)
        group.recv(1 - group.rank)
        assert group.bytes_sent - sent == pytest.approx(x.nbytes, rel=0.01)
        sent = group.bytes_sent
        group.send(x, group.rank)  # goes nowhere
        group.recv(group.rank)
        assert group.bytes_sent == sent
        part = group.subgroup([0, 1])
        part.all_gather(x)
        assert group.bytes_sent - sent == pytest.approx(x.nbytes, rel=0.01)
        assert part.bytes_sent == group.bytes_sent

    run_over(link, 2, rank)
