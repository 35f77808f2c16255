"""Measures a step of `paceline.torch.DDP` beside the same step without communication. `-s` prints the figures."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from figures import QUIET
from paceline.testing import coordinator
from support.peers import need_peers
from support.processes import workers

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]

LAYERS, WIDTH, BATCH = 12, 1024, 128
"""12.6 M parameters, 48 MiB of gradients."""
ROUNDS = 25

MOST_OVER_NO_COMMUNICATION = 0.08
"""The most that communication may add, as a fraction of the step without it."""
NOISE = 0.03 if QUIET else 0.10
"""How much the same figure differs between two runs."""

CODE = f"""
import torch, paceline.torch
torch.set_num_threads(1)

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})))

x = torch.randn({BATCH}, {WIDTH})

def step(model):
    '''Seconds of a forward and a backward pass, by the wall clock and of CPU time.'''
    start, cpu = time.perf_counter(), time.process_time()
    model.zero_grad()
    model(x).square().mean().backward()
    return time.perf_counter() - start, time.process_time() - cpu

wait_for_go()
with paceline.join() as session:
    group = session.group
    ways = {{
        "unwrapped": net(),
        # No communication, and all else alike: gradients go to buckets too.
        "alone": paceline.torch.DDP(net(), group.subgroup([group.rank])),
        "DDP": paceline.torch.DDP(net(), group),
        "bf16": paceline.torch.DDP(net(), group, compression="bf16"),
    }}
    times = {{way: [] for way in ways}}
    for number in range({ROUNDS} + 3):  # turn and turn about, for the machine is not the same from minute to minute
        for way, model in ways.items():
            group.barrier()
            took = step(model)
            if number >= 3:
                times[way].append(took)
    emit("facts", times=times)
"""

Times = dict[str, list[tuple[float, float]]]
"""Milliseconds of each step by way: (wall clock of the slowest rank, mean CPU time of a rank)."""


def measured(world: int) -> Times:
    with coordinator() as address, workers(world, CODE, COORDINATOR=address, MIN_WORKERS=str(world)) as started:
        for worker in started:
            worker.go()
        ranks: list[Any] = [worker.expect("facts", timeout=240.0)["times"] for worker in started]
    return {
        way: [
            (max(wall for wall, _ in step) * 1e3, statistics.mean(cpu for _, cpu in step) * 1e3)
            for step in zip(*(rank[way] for rank in ranks), strict=True)
        ]
        for way in ranks[0]
    }


def over(times: Times, way: str, beside: str, column: int) -> float:
    """Returns the median, over pairs of steps, of the fraction that a way takes more than `beside`."""
    return statistics.median(b[column] / a[column] - 1 for a, b in zip(times[beside], times[way], strict=True))


@pytest.mark.parametrize("world", [2, 4])
def test_what_communication_adds_to_a_step(world: int) -> None:
    """With at most one core per rank, links and reduction take their CPU time from the matrix products."""
    need_peers()
    times = measured(world)
    print(f"\nW={world}; over the unwrapped module, and over DDP alone, by the wall clock and by CPU time:")
    for way, found in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        more = [over(times, way, beside, column) for beside in ("unwrapped", "alone") for column in (0, 1)]
        print(f"  {way:<10} {wall:5.0f} ms  CPU {cpu:5.0f} ms  {' '.join(f'{part:+6.1%}' for part in more)}")
    # One of the two clocks is enough: other load lengthens the wall clock, and a cold cache the CPU time.
    added = min(over(times, "DDP", "alone", column) for column in (0, 1))
    assert added <= MOST_OVER_NO_COMMUNICATION + NOISE
