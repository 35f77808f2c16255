"""Paceline's TCP links beside Gloo, between hosts: each rank is on a host of its own, a network namespace.

The two take turns in the same processes, so what else the machine does falls on both; who has no turn sleeps.
"""

from __future__ import annotations

import statistics

import pytest

from support.figures import NOISE, at_least
from support.host_coordinator import coordinator_on
from support.netns import network
from support.peers import need_peers
from support.processes import Worker

pytestmark = [pytest.mark.benchmark, pytest.mark.peers, pytest.mark.root, pytest.mark.timeout(600)]

SIZES = tuple(64 << 10 << 2 * power for power in range(6))
"""Bytes: 64 KiB to 64 MiB."""

TURNS = 10

CODE = """
import statistics
import torch, torch.distributed as dist
from paceline.links.base import Purpose

torch.set_num_threads(1)
rank, sizes, turns = int(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=sys.argv[4], rank=rank, world_size=2)
with paceline.join(rank=rank, world_size=2, timeout=30) as session:
    for size in sizes:
        x, t = np.zeros(size // 4, np.float32), torch.zeros(size // 4)
        calls = {"paceline": lambda: session.group.all_reduce(x, out=x), "gloo": lambda: dist.all_reduce(t)}
        count = max(3, min(50, (32 << 20) // size))
        times = {impl: [] for impl in calls}
        for turn in range(turns + 1):  # the first warms up
            for impl, call in calls.items():
                dist.barrier()
                for _ in range(count):
                    start = time.perf_counter()
                    call()
                    if turn:
                        times[impl].append(time.perf_counter() - start)
        kind = session.group.mesh.link(1 - rank, Purpose.COLLECTIVE).kind
        emit("measured", size=size, kind=kind, **{impl: statistics.median(found) for impl, found in times.items()})
    session.barrier("done")
"""


def test_all_reduce_between_hosts() -> None:
    """W=2: at least 1.3 times Gloo's bus bandwidth in the middle of the sizes, and never less than Gloo's."""
    need_peers()
    with network(2) as net, coordinator_on(net.hosts[0]) as address:
        started: list[Worker] = []
        try:
            for rank, host in enumerate(net.hosts):
                variables = {
                    "PACELINE_COORDINATOR": address,
                    "PACELINE_FLIGHT_DIR": "off",
                    "GLOO_SOCKET_IFNAME": "eth0",
                }
                arguments = (
                    f"sys.argv[1:] = ['{rank}', '{list(SIZES)}', '{TURNS}', 'tcp://{net.hosts[0].address}:7500']"
                )
                started.append(Worker(f"{arguments}\n{CODE}", variables, host))
            ratios = {}
            for size in SIZES:
                told = [worker.expect("measured", timeout=120) for worker in started]
                assert {(each["size"], each["kind"]) for each in told} == {(size, "tcp")}
                mine, theirs = (max(each[impl] for each in told) for impl in ("paceline", "gloo"))
                ratios[size] = theirs / mine
                print(f"\n{size >> 10:>8} KiB  paceline {mine * 1e6:10.1f} us  gloo {theirs * 1e6:10.1f} us", end="")
        finally:
            for worker in started:
                worker.close()
    assert min(ratios.values()) >= 1 / NOISE, ratios
    assert statistics.median(ratios.values()) >= at_least(1.3), ratios
