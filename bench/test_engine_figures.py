"""Measures a step of `paceline.torch.DDP` over Gloo beside torch's DDP on Gloo, and recovery with it. `-s` prints."""

from __future__ import annotations

import statistics

import pytest

from figures import QUIET
from support.peers import need_peers
from support.ports import free_port
from torch_steps import measured_steps

pytestmark = [pytest.mark.needs(what="peers"), pytest.mark.timeout(300)]

NOISE = 0.03 if QUIET else 0.15
"""How much the same figure differs between two runs."""

CODE = """
import dataclasses
with paceline.join() as session:
    group = session.group
    where = "tcp://127.0.0.1:" + os.environ["TORCH_PORT"]
    dist.init_process_group("gloo", init_method=where, rank=group.rank, world_size=group.size)
    by_links = group.subgroup(range(group.size), name="links")
    by_links._config = dataclasses.replace(group._core._config, engine="links")
    times = in_turns(group, {
        "torch's DDP on Gloo": torch.nn.parallel.DistributedDataParallel(net()),
        "DDP over Gloo": paceline.torch.DDP(net(), group),
        "DDP over links": paceline.torch.DDP(net(), by_links),
    })
    dist.destroy_process_group()
    emit("facts", times=times)
"""


@pytest.mark.parametrize("world", [2, 4])
def test_a_ddp_step_over_gloo_is_not_slower_than_torchs(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    need_peers()
    monkeypatch.setenv("TORCH_PORT", str(free_port()))
    times = measured_steps(world, CODE, ENGINE="gloo")
    usual = times["torch's DDP on Gloo"]
    print(
        f"\nW={world}; median step by wall clock and CPU time, and their median ratios to torch's DDP in the same turn:"
    )
    ratios = {}
    for way, found in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        pairs = list(zip(found, usual, strict=True))
        ratios[way] = [statistics.median(mine[clock] / theirs[clock] for mine, theirs in pairs) for clock in (0, 1)]
        print(f"  {way:<20} {wall:6.1f} ms {ratios[way][0]:.2f}  CPU {cpu:6.1f} ms {ratios[way][1]:.2f}")
    # One of the two clocks is enough: other load lengthens the wall clock, and a cold cache the CPU time.
    assert min(ratios["DDP over Gloo"]) <= 1 + NOISE
