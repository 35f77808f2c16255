"""Times steps of torch models that are wrapped in several ways, in turns, in real processes."""

from __future__ import annotations

import statistics
from typing import Any

from paceline.testing import coordinator
from support.processes import workers

__all__ = ["Times", "measured_steps"]

LAYERS, WIDTH, BATCH = 12, 1024, 128
"""12.6 M parameters, 48 MiB of gradients."""
ROUNDS = 25

Times = dict[str, list[tuple[float, float]]]
"""Milliseconds of each step by way: (wall clock of the slowest rank, mean CPU time of a rank)."""

_BEFORE = f"""
import torch, torch.distributed as dist, paceline.torch
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

def in_turns(group, ways):  # because the machine's speed changes
    times = {{way: [] for way in ways}}
    for number in range({ROUNDS} + 3):
        for way, model in ways.items():
            group.barrier()
            took = step(model)
            if number >= 3:
                times[way].append(took)
    return times

wait_for_go()
"""


def measured_steps(world: int, code: str, **environment: str) -> Times:
    """Runs code on each rank, which ends with `emit("facts", times=in_turns(group, WAYS))`.

    Args:
        world: number of ranks.
        code: `net()` is there to make the model that each way wraps.
        environment: PACELINE_* variables without their prefix.
    """
    settings = {"MIN_WORKERS": str(world), **environment}
    with coordinator() as address, workers(world, _BEFORE + code, COORDINATOR=address, **settings) as started:
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
