"""Defects that other systems have, 11 to 23: cost, strangers, byte order, records. See test_reference_defects.py."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from unittest import mock

import numpy as np
import pytest

from paceline._base.waits import loop_thread
from paceline._group import Group
from paceline._links.base import Peer
from paceline._links.fault import Fault
from paceline._links.grpc_door import Door
from paceline._links.grpc_mesh import GrpcMesh
from paceline.credentials import IN_THE_CLEAR
from paceline.errors import (
    CollectiveMismatch,
)
from paceline.testing import run_groups
from paceline_protocol import OURS
from support.grpc_pair import JOB, grpc_world
from support.reference import MIB, Background, X, every, states, talk_both_ways, wait_for
from support.worlds import SOON, run_over, scheduled, world_over

# Over gRPC these have pytest.mark.slow (support.worlds.EACH_LINK).

pytestmark = pytest.mark.alone

# 11. Two writes a frame and delayed acknowledgements: 88 ms for a star of 1 KiB, 88 ms for a barrier.


@pytest.mark.parametrize("world", [2, 3])
def test_11_a_small_call_over_loopback_waits_for_no_acknowledgement(world: int) -> None:
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
def test_12_nobody_moves_more_than_its_share_of_a_large_array(world: int, link: str) -> None:
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


@every("broadcast")
def test_12_no_root_sends_to_all(schedule: str) -> None:
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

        def in_line(group: Group) -> None:
            for task in [group.all_reduce(x, async_op=True) for _ in range(5)]:
                task.wait()

        go = threading.Barrier(4)

        def member(group: Group) -> None:
            work(group)
            in_line(group)  # from now on the group has its one thread
            go.wait(20)
            go.wait(20)
            for _ in range(5):
                work(group)
                in_line(group)

        members = [Background(lambda group=group: member(group)) for group in groups]
        go.wait(20)
        with mock.patch.object(threading.Thread, "start", watched):
            go.wait(20)
            for each in members:
                each.result()
    assert names == []


# 14. One lock for both directions: a send waited 513 ms behind a receive of the same pair.


def test_14_a_send_does_not_wait_behind_a_receive_on_the_same_pair(link: str) -> None:
    with world_over(link, 2) as groups:
        talk_both_ways(groups)
        waiting = Background(lambda: groups[0].recv(1, tag=3, timeout=20.0))
        wait_for(lambda: states(groups[0])[-1] == ("recv", "running"))
        started = time.monotonic()
        for _ in range(3):
            groups[0].send(np.ones(MIB // 8), 1, timeout=10.0)
        assert time.monotonic() - started < 0.3
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


def test_14_two_ranks_may_send_much_to_each_other_before_either_receives(link: str) -> None:
    x = np.ones(24 * MIB, np.uint8)

    def rank(group: Group) -> int:
        group.send(x, 1 - group.rank, timeout=20.0)
        return int(group.recv(1 - group.rank, timeout=20.0)[0].sum())

    assert run_over(link, 2, rank) == [x.size] * 2


# 20. A silent connection blocked the rendezvous for ever.


@pytest.mark.parametrize(
    "said", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\xff" * 8], ids=["nothing", "half", "length"]
)
def test_20_connections_that_say_nothing_more_hold_nobody_up(said: bytes) -> None:
    """The last is the reference's length of a frame: 2**64 - 1 bytes to come."""
    with grpc_world(2) as made, ExitStack() as stack:
        for peer in made.meshes[0].peers:
            host, port = peer.address.split(":")
            for _ in range(5):
                stranger = stack.enter_context(socket.create_connection((host, int(port))))
                stranger.sendall(said)
        results = run_groups([Group(mesh, SOON) for mesh in made.meshes], lambda g: g.all_reduce(X).tolist())
    assert results == [[2] * 4] * 2


# 21. IPv4 alone; the same byte order assumed everywhere.


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_21_links_over_ipv6() -> None:
    thread = loop_thread()
    doors = [Door(JOB, IN_THE_CLEAR) for _ in range(2)]
    with ExitStack() as stack:
        for door in doors:
            stack.callback(lambda door=door: thread.run(door.close()))
        ports = [thread.run(door.start("::1", 0)) for door in doors]
        peers = [Peer(rank, f"member-{rank}", "host", f"[::1]:{ports[rank]}", 100 + rank) for rank in range(2)]
        meshes = [
            GrpcMesh(
                JOB, 1, OURS.newest, rank, peers, Fault(1, rank, 0.05), thread, 3.0, IN_THE_CLEAR, doors[rank].kinds
            )
            for rank in range(2)
        ]
        for door, mesh in zip(doors, meshes, strict=True):
            thread.loop.call_soon_threadsafe(door.enter, mesh)
        results = run_groups([Group(mesh, SOON) for mesh in meshes], lambda g: g.all_reduce(X).tolist())
    assert results == [[2] * 4] * 2


@pytest.mark.parametrize("dtype", ["i2", "i8", "f4", "f8", "c16"])
def test_21_ranks_of_either_byte_order_understand_each_other(dtype: str, link: str) -> None:
    values = np.array([1, 2, 300, 40, 5, 6])

    def rank(group: Group) -> None:
        x = values.astype(np.dtype(dtype).newbyteorder("<>"[group.rank]))
        for result, expected in (
            (group.all_reduce(x), 2 * values),
            (group.reduce_scatter(x), 2 * values[3 * group.rank : 3 * group.rank + 3]),
            (group.all_gather(x), np.tile(values, 2)),
            (group.broadcast(x, root=1), values),
            (group.all_to_all(x), np.tile(values[3 * group.rank : 3 * group.rank + 3], 2)),
        ):
            assert result.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(result, expected)
        group.send(x, 1 - group.rank)
        np.testing.assert_array_equal(group.recv(1 - group.rank)[0], values)

    run_over(link, 2, rank)


# 23. No log of operations, no counters.


def test_23_the_recorder_tells_of_every_operation(link: str) -> None:
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
        entries = group.recorder.snapshot()
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


def test_23_bytes_are_counted(link: str) -> None:
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
