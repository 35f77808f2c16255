"""Some members share memory, others are reached by tcp or gRPC alone: every collective, by every schedule."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

from integration.host_coordinator import coordinator_on
from integration.mixed_world import MixedWorld, Place, kinds_of, mixed_world, run_all
from paceline._collectives.choose import choose, nodes_of, only
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from support.collective_calls import WAYS, Call, exact_values
from support.netns import Host, network
from support.parts import cut_frames
from support.processes import Worker

LAYOUTS: dict[str, list[Place]] = {
    "two nodes": [Place("a"), Place("a"), Place("b"), Place("b")],
    "in turn": [Place("a"), Place("b"), Place("a"), Place("b")],
    "three and one": [Place("a"), Place("b"), Place("a"), Place("a", streams=3)],
    "one with grpc alone": [Place("a"), Place("a", ("grpc",)), Place("b"), Place("b")],
    "all kinds at one": [Place("a"), Place("a", ("shm",)), Place("b", ("tcp",)), Place("", ("grpc",))],
}

MESSAGES = {"in a slot": 100, "copied": 5_000, "lent": 120_000}
"""Rows of the whole array, of 4 bytes: frames as shared memory tells them apart. The last make several frames."""


@pytest.fixture(scope="module", params=LAYOUTS)
def world(request: pytest.FixtureRequest) -> Iterator[MixedWorld]:
    with mixed_world(LAYOUTS[request.param]) as made:
        yield made


def kind_between(a: Place, b: Place) -> str:
    both = set(a.links) & set(b.links)
    if "shm" in both and a.node and a.node == b.node:
        return "shm"
    return "tcp" if "tcp" in both else "grpc"


def test_each_pair_uses_the_best_common_kind_of_link(world: MixedWorld) -> None:
    places = world.places
    run_all(world.groups, lambda group: group.all_to_all(np.arange(4)))
    for me, mesh in enumerate(world.meshes):
        found = kinds_of(mesh)
        assert found == {you: kind_between(places[me], places[you]) for you in range(4) if you != me}


@pytest.mark.slow
@pytest.mark.parametrize("size", MESSAGES)
@pytest.mark.parametrize(("collective", "schedule", "variant"), WAYS)
def test_every_schedule_matches_numpy(
    world: MixedWorld, collective: str, schedule: str, variant: str, size: str
) -> None:
    rng, rows = np.random.default_rng(1), MESSAGES[size]
    sent = None
    if variant == "uneven":
        counts = [rows, 0, rows // 2, 7]
    elif variant.startswith("sent"):
        sent = [[rows // 4, 0, 7, rows // 8], [1, 2, 3, 4], [rows // 2, 0, 0, 0], [5, 5, 5, rows // 2]]
        counts = [sum(each) for each in sent]
    else:
        counts = [rows] * 4
    xs = [exact_values(rng, count, np.dtype(np.float32)) for count in counts]
    call = Call(collective, variant, xs, "sum", 2, sent)

    def at(group: Group) -> Any:
        group._core.choose = partial(choose, rules=only(collective, schedule))
        cut_frames(group, 1 << 17)
        x = group.empty(xs[group.rank].shape, np.float32)  # small ones are ordinary
        x[:] = xs[group.rank]
        given = x.reshape(4, -1) if collective == "scatter" else x
        result = call.at(group, given)
        assert np.array_equal(x, xs[group.rank])
        return result

    found = run_all(world.groups, at)
    for result, expected in zip(found, call.expected(), strict=True):
        assert (result is None) == (expected is None)
        assert result is None or np.array_equal(result, expected)


@pytest.mark.parametrize("schedule", SCHEDULES["barrier"])
def test_a_barrier_waits_for_the_last_rank_under_every_schedule(world: MixedWorld, schedule: str) -> None:
    passed: list[int] = []

    def at(group: Group) -> int:
        group._core.choose = partial(choose, rules=only("barrier", schedule))
        if group.rank == 3:
            passed.append(1)
        group.barrier()
        return len(passed)

    assert run_all(world.groups, at) == [1] * 4


@pytest.mark.parametrize("size", MESSAGES)
def test_messages_between_all_pairs_arrive(world: MixedWorld, size: str) -> None:
    rows = MESSAGES[size]

    def at(group: Group) -> list[tuple[float, int]]:
        others = [rank for rank in range(4) if rank != group.rank]
        for other in others:
            group.send(np.full(rows, 10.0 * group.rank + other), other, tag=group.rank)
        received = [group.recv(other, tag=other) for other in others]
        return [(float(np.unique(x).item()), source) for x, source in received]

    for me, received in enumerate(run_all(world.groups, at)):
        assert received == [(10.0 * you + me, you) for you in range(4) if you != me]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_ranks_may_send_before_they_receive(kind: str, count: int) -> None:
    """A circle of messages that are longer than links hold: whoever waits to send takes in what is sent to it."""
    rows = (16 << 20) // 4

    def at(group: Group) -> float:
        group.send(np.full(rows, group.rank, np.float32), (group.rank + 1) % count, timeout=10.0)
        received, source = group.recv((group.rank - 1) % count, timeout=10.0)
        assert source == (group.rank - 1) % count
        return float(np.unique(received).item())

    with mixed_world([Place(links=(kind,))] * count) as world:
        assert run_all(world.groups, at) == [(rank - 1) % count for rank in range(count)]


def test_the_rules_choose_the_hierarchical_schedule_with_equal_results(world: MixedWorld) -> None:
    """What the rules choose by themselves, at a size at which nodes count; the bits are alike on all ranks."""
    x = np.random.default_rng(3).standard_normal((4, 200_000)).astype(np.float32)

    def at(group: Group, pick: Callable[..., Any]) -> Any:
        group._core.choose = pick
        return group.all_reduce(x[group.rank], op="sum")

    chosen = choose("all_reduce", x[0].nbytes, 4, nodes=nodes_of(world.meshes[0].peers)).schedule
    assert chosen == "hierarchical"
    found = run_all(world.groups, partial(at, pick=choose))
    assert len({each.tobytes() for each in found}) == 1
    np.testing.assert_allclose(found[0], x.sum(0, dtype=np.float64), rtol=1e-5, atol=1e-5)


TRAFFIC = """
from paceline._collectives.choose import nodes_of
from paceline._links.base import Purpose

N = {n}
with paceline.join() as session:
    group = session.group
    x = group.empty(N, np.float32)

    def fill():
        x[:] = np.arange(N) % 1000
        x[:] += group.rank

    for _ in range(2):  # the first opens the links
        fill()
        session.barrier("all are here")
        emit("before")
        wait_for_go()
        group.all_reduce(x, op="sum", out=x)
        session.barrier("all are done")
        emit("after")
        wait_for_go()
    expected = 4 * (np.arange(N) % 1000) + 6
    kinds = {{rank: link.kind for (rank, *_), link in group._core.mesh._links.items() if link.kind}}
    nodes = nodes_of(group.members)
    emit("done", rank=group.rank, right=bool(np.array_equal(x, expected)), nodes=nodes, kinds=kinds)
    wait_for_go()
"""


@pytest.mark.needs(what="root")
def test_each_array_crosses_the_network_between_two_hosts_once() -> None:
    """Each host sends 2(H-1)/H of the array, one array here, where a ring of four ranks would send 1.5 or more."""
    mib = 64
    with network(2) as net, ExitStack() as stack:
        address = stack.enter_context(coordinator_on(net.hosts[0]))
        environment = {
            "PACELINE_COORDINATOR": address,
            "PACELINE_MIN_WORKERS": "4",
            "PACELINE_FLIGHT_DIR": "off",
        }
        started = []
        for host in [*net.hosts, *net.hosts]:
            worker = Worker(TRAFFIC.format(n=(mib << 20) // 4), environment, host)
            stack.callback(worker.close)
            started.append(worker)
        crossed: dict[str, int] = {}
        for _ in range(2):
            for event, sign in (("before", -1), ("after", 1)):
                for worker in started:
                    worker.expect(event, 40.0)
                if event == "before":
                    crossed = dict.fromkeys((host.name for host in net.hosts), 0)
                for host in net.hosts:
                    crossed[host.name] += sign * _sent(host)
                for worker in started:
                    worker.go()
        told = [worker.expect("done") for worker in started]
    assert all(each["right"] for each in told)
    for each in told:
        nodes, me = each["nodes"], each["rank"]
        assert sorted(nodes) == [0, 0, 1, 1]
        expected = {str(you): "shm" if nodes[you] == nodes[me] else "tcp" for you in range(4) if you != me}
        assert each["kinds"].items() <= expected.items()
        assert set(each["kinds"].values()) == {"shm", "tcp"}
    for count in crossed.values():
        assert 1.0 <= count / (mib << 20) <= 1.15, crossed


def _sent(host: Host) -> int:
    """Bytes that have left a host by its interface."""
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    command = ["ip", "netns", "exec", host.name, "cat", path]  # it mounts the namespace's own /sys
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout)
