"""Measures steps on unequal workers, with equal shares of the batch and with shares that follow the speeds.

    python bench/balance.py --rounds 5
    python bench/balance.py --rounds 5 --equal

Two workers train a NumPy model, each on a core of its own; the second one shares its core with a process that computes
all the time, so it has half a core. With `--equal` four equal workers have the machine for themselves. Each round runs
a job for each way; a rate is that of the last half of its steps. The ideal rate is that of the speeds that the workers
have measured of themselves, added up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from multiprocessing.connection import Connection

import numpy as np

import paceline
from paceline import nn
from paceline.testing import coordinator

BATCH, WIDTH, LAYERS = 512, 1024, 4
WAYS = {"equal shares": (0, False), "balanced": (0, True), "16 microbatches": (16, False), "balanced 16": (16, True)}
"""For each way the microbatches, and whether shares follow the speeds."""


def compute_for_ever(core: int) -> None:
    """Takes half of a core that a worker computes on, too."""
    os.sched_setaffinity(0, {core})
    while True:
        sum(range(10_000))


def train(address: str, way: str, workers: int, steps: int, core: int | None, pipe: Connection) -> None:
    """One worker; tells its rate in steps per second, its speed, how often its share changed, and the last one."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    environment = {"COORDINATOR": address, "MIN_WORKERS": str(workers), "MAX_WORKERS": str(workers)}
    os.environ.update({f"PACELINE_{name}": value for name, value in environment.items()})
    microbatches, balance = WAYS[way]
    with paceline.join() as session:
        rng = np.random.default_rng(0)
        model = paceline.DDP(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, rng=rng) for _ in range(LAYERS))), session.group)
        optimizer = paceline.optim.SGD(model, lr=1e-4)
        sampler = paceline.ElasticSampler(8 * BATCH, BATCH, microbatches=microbatches)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        x = rng.standard_normal((8 * BATCH, WIDTH)).astype(np.float32)
        ends, shares = [], []
        for step in session.steps(state, total=steps, balance=balance):
            with step:
                optimizer.zero_grad()
                for micro in step.microbatches if microbatches else ():
                    with micro:
                        y = model(x[micro.indices])
                        model.backward(y / len(y))
                if not microbatches:
                    y = model(x[step.indices])
                    model.backward(y / len(y), step.weight)
                optimizer.step()
            ends.append(time.monotonic())
            shares.append(session.stats()["share"])
        half = steps // 2
        changes = sum(one != other for one, other in pairwise(shares))
        pipe.send(((steps - half - 1) / (ends[-1] - ends[half]), session.stats()["speed"], changes, shares[-1]))


def run(way: str, workers: int, steps: int, *, equal: bool) -> tuple[float, float, int, list[float]]:
    """One job; returns steps per second, those of the ideal division, changes of shares, and the last shares."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        address = stack.enter_context(coordinator())
        if not equal:
            spinner = context.Process(target=compute_for_ever, args=(1,))
            spinner.start()
            stack.callback(spinner.kill)
        pipes = []
        for number in range(workers):
            pipe, theirs = context.Pipe()
            core = None if equal else number
            process = context.Process(target=train, args=(address, way, workers, steps, core, theirs))
            process.start()
            stack.callback(process.join, 20)
            stack.callback(process.kill)
            pipes.append(pipe)
        told = [pipe.recv() for pipe in pipes]
    ideal = sum(speed for _, speed, _, _ in told) / BATCH
    return told[0][0], ideal, told[0][2], [share for *_, share in told]


def main() -> None:
    """Reads the arguments, and alternates between the ways."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--equal", action="store_true", help="four equal workers")
    asked = parser.parse_args()
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    ideals: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(asked.rounds):
        for way in WAYS:
            rate, ideal, changes, shares = run(way, 4 if asked.equal else 2, asked.steps, equal=asked.equal)
            rates[way].append(rate)
            ideals[way].append(rate / ideal)
            told = ", ".join(f"{share:.3f}" for share in shares)
            print(f"{way}: {rate:.2f} steps/s, {rate / ideal:.3f} of the ideal; {changes} changes, {told}", flush=True)
    for way, base in (("balanced", "equal shares"), ("balanced 16", "16 microbatches")):
        ratios = [one / other for one, other in zip(rates[way], rates[base], strict=True)]
        spread = f"{statistics.median(ratios):.3f} times ({min(ratios):.3f} to {max(ratios):.3f}) the rate of {base}"
        print(f"{way}: {spread}; {statistics.median(ideals[way]):.3f} of the ideal")


if __name__ == "__main__":
    sys.exit(main())
