"""Measures a step of `paceline.torch.DDP` beside the same step without communication. `-s` prints the figures."""

from __future__ import annotations

import statistics

import pytest

from figures import QUIET
from support.peers import need_peers
from torch_steps import Times, measured_steps

pytestmark = [pytest.mark.needs(what="peers"), pytest.mark.timeout(300)]

MOST_OVER_NO_COMMUNICATION = 0.08
"""The most that communication may add, as a fraction of the step without it."""
NOISE = 0.03 if QUIET else 0.10
"""How much the same figure differs between two runs."""

CODE = """
with paceline.join() as session:
    group = session.group
    times = in_turns(group, {
        "unwrapped": net(),
        # No communication, and all else alike: gradients go to buckets too.
        "alone": paceline.torch.DDP(net(), group.subgroup([group.rank])),
        "DDP": paceline.torch.DDP(net(), group),
        "bf16": paceline.torch.DDP(net(), group, compression="bf16"),
    })
    emit("facts", times=times)
"""


def over(times: Times, way: str, beside: str, column: int) -> float:
    """Returns the median, over pairs of steps, of the fraction that a way takes more than `beside`."""
    return statistics.median(b[column] / a[column] - 1 for a, b in zip(times[beside], times[way], strict=True))


@pytest.mark.parametrize("world", [2, 4])
def test_communication_adds_little_to_a_paceline_torch_ddp_step(world: int) -> None:
    """With at most one core per rank, links and reduction take their CPU time from the matrix products."""
    need_peers()
    times = measured_steps(world, CODE)
    print(f"\nW={world}; against the unwrapped module and against DDP alone, by the wall clock and by CPU time:")
    for way, found in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        more = [over(times, way, beside, column) for beside in ("unwrapped", "alone") for column in (0, 1)]
        print(f"  {way:<10} {wall:5.0f} ms  CPU {cpu:5.0f} ms  {' '.join(f'{part:+6.1%}' for part in more)}")
    # One of the two clocks is enough: other load lengthens the wall clock, and a cold cache the CPU time.
    added = min(over(times, "DDP", "alone", column) for column in (0, 1))
    assert added <= MOST_OVER_NO_COMMUNICATION + NOISE
