"""Measures a step of DDP beside the same step without communication, in real processes. `-s` prints the figures.

It uses the kinds of links that `PACELINE_LINKS` allows.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = pytest.mark.timeout(300)

WORLD = 2
LAYERS, WIDTH, BATCH = 12, 1024, 128
"""12.6 M parameters, 48 MiB of gradients; BATCH makes a step of 100 to 150 ms on one core."""
ROUNDS = 25

MOST_OVER_NO_COMMUNICATION = 0.10
"""The most that communication may add, as a fraction of the step without it."""
NOISE = 0.03
"""How much the same figure differs between two runs."""

STEP = f"""
import statistics, time
from paceline import nn

def model():
    rng = np.random.default_rng(0)
    return nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, rng=rng) for _ in range({LAYERS})))

x = np.random.default_rng(1).standard_normal(({BATCH}, {WIDTH})).astype(np.float32)
dy = np.ones_like(x) / len(x)

def step(module, parameters):
    '''Seconds of a forward and a backward pass, by the wall clock and of CPU time.'''
    start, cpu = time.perf_counter(), time.process_time()
    for parameter in parameters:
        parameter.grad = None
    module(x) if callable(module) else module.forward(x)
    module.backward(dy)
    return time.perf_counter() - start, time.process_time() - cpu

def compare(group, ways, rounds):
    '''Both times of each step, by way. The ways take turns, because the machine's speed changes.'''
    modules = {{way: make(group) for way, make in ways.items()}}
    parameters = {{way: [p for _, p in module.named_parameters()] for way, module in modules.items()}}
    times = {{way: [] for way in ways}}
    for round in range(rounds + 3):
        for way, module in modules.items():
            group.barrier()
            took = step(module, parameters[way])
            if round >= 3:
                times[way].append(took)
    return times
"""


def facts(code: str, world: int = WORLD) -> list[dict[str, Any]]:
    """Returns what each worker reports in its event "facts"."""
    with coordinator() as address, workers(world, STEP + code, COORDINATOR=address, MIN_WORKERS=str(world)) as started:
        found = [worker.expect("facts", timeout=240.0) for worker in started]
        assert [worker.wait() for worker in started] == [0] * world
        return found


ALONE = {"alone": "paceline.DDP(model(), group.subgroup([group.rank]))"}
"""No communication, and everything else the same: gradients are written into buckets too, in memory that stays."""

Times = dict[str, list[tuple[float, float]]]
"""Milliseconds of each step by way: (wall clock of the slowest rank, which all wait for; mean CPU time of a rank)."""


def compared(ways: dict[str, str], rounds: int = ROUNDS, world: int = WORLD) -> Times:
    """Measures several ways; each is an expression that makes a module from `group`."""
    made = ", ".join(f"{way!r}: lambda group: {code}" for way, code in ways.items())
    code = f"""
with paceline.join() as session:
    emit("facts", times=compare(session.group, {{{made}}}, {rounds}))
"""
    ranks = [found["times"] for found in facts(code, world)]
    return {
        way: [
            (max(wall for wall, _ in step) * 1e3, statistics.mean(cpu for _, cpu in step) * 1e3)
            for step in zip(*(rank[way] for rank in ranks), strict=True)
        ]
        for way in ways
    }


def over(times: Times, way: str, column: int = 0) -> float:
    """Returns the median, over pairs of steps, of the fraction that a way takes more than no communication."""
    return statistics.median(b[column] / a[column] - 1 for a, b in zip(times["alone"], times[way], strict=True))


def show(times: Times) -> None:
    print(
        f"\nlinks: {os.environ.get('PACELINE_LINKS', 'all kinds')}; against no communication, wall clock and CPU time:"
    )
    for way, found in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"  {way:<10} {wall:5.0f} ms {over(times, way):+5.0%}   CPU {cpu:5.0f} ms {over(times, way, 1):+5.0%}")


@pytest.mark.parametrize("world", [2, 4])
def test_communication_adds_little_to_a_ddp_step(world: int) -> None:
    """With at most one core per rank, links and reduction take their CPU time from the matrix products."""
    times = compared({"unwrapped": "model()", **ALONE, "DDP": "paceline.DDP(model(), group)"}, world=world)
    show(times)
    # One of the two clocks is enough: other load lengthens the wall clock, and a cold cache the CPU time.
    assert min(over(times, "DDP"), over(times, "DDP", 1)) <= MOST_OVER_NO_COMMUNICATION + NOISE


@pytest.mark.slow  # to look at
def test_cost_of_compression_where_bandwidth_is_cheap() -> None:
    """On one machine encoding takes longer than sending; compare this cost with the gain on a network."""
    ways = {way: f"paceline.DDP(model(), group, compression={way!r})" for way in ("bf16", "int8")}
    show(compared({**ALONE, "DDP": "paceline.DDP(model(), group)", **ways}, rounds=12))


@pytest.mark.slow  # to look at
def test_cost_of_a_step_by_bucket_size() -> None:
    """Smaller buckets leave earlier and overlap more, but each costs a message."""
    sizes = (1, 4, 8, 25, 50, 100)
    ways = {f"{size} MiB": f"paceline.DDP(model(), group, bucket_mb={size})" for size in sizes}
    show(compared({**ALONE, **ways}, rounds=10))


def test_cost_of_issuing_and_waiting_for_an_asynchronous_call() -> None:
    """Compares an asynchronous call of 4 bytes, which the group's thread runs, with one in the caller's thread."""
    code = """
with paceline.join() as session:
    group, one, found = session.group, np.ones(1, np.float32), {}
    def took(act):
        start = time.perf_counter()
        act()
        return (time.perf_counter() - start) * 1e6
    issued = []
    def behind():
        start = time.perf_counter()
        work = group.all_reduce(one, out=one, async_op=True)
        issued.append((time.perf_counter() - start) * 1e6)
        work.wait()
    for name, act in (("behind", behind), ("own thread", lambda: group.all_reduce(one, out=one))):
        group.barrier()
        found[name] = statistics.median(took(act) for _ in range(500))
    emit("facts", issue=statistics.median(issued), **found)
"""
    rank = facts(code)[0]
    print(
        f"\nasynchronous {rank['behind']:.0f} us, of which issuing {rank['issue']:.0f}; "
        f"in the caller's thread {rank['own thread']:.0f} us"
    )
