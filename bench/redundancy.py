"""Measures steps and recovery with copies of shards: four workers shard a NumPy model on this machine.

    python bench/redundancy.py --rounds 5

Each round runs a job for each way: FULL_SHARD with `redundancy` 1 and 2, and HYBRID_SHARD with two copies. It prints
the median time of a step, the memory of a worker, and the time from a SIGKILL to the next step that all others have. A
step computes layers of 2,048 x 2,048 on `--rows` rows in each worker, and Adam updates them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import paceline
from paceline import nn
from paceline.testing import coordinator

WORLD, WIDTH = 4, 2048
"""Number of workers; rows and columns of a layer."""

KILL_AT, VICTIM = 12, 1
"""The step in which a worker is killed, and its rank."""

WAYS: dict[str, dict[str, Any]] = {
    "redundancy=1": {"redundancy": 1},
    "redundancy=2": {"redundancy": 2},
    "HYBRID_SHARD": {"strategy": paceline.ShardingStrategy.HYBRID_SHARD, "intra_node_size": 2},
}

GO_ON = {"redundancy=1": 0, "redundancy=2": 3, "HYBRID_SHARD": 2}
"""The number of workers that go on after the kill; with one holder of each shard the state is lost."""


def train(address: str, way: str, layers: int, rows: int, pipe: Connection) -> None:
    """One worker. It tells when it is in step KILL_AT, then how its steps went, and last the commit after a loss."""
    environment = {"COORDINATOR": address, "MIN_WORKERS": "2", "MAX_WORKERS": str(WORLD), "FAILURE_TIMEOUT": "3"}
    os.environ.update({f"PACELINE_{name}": value for name, value in environment.items()})
    with paceline.join() as session:
        rng, group = np.random.default_rng(0), session.group
        parts = [nn.Linear(WIDTH, WIDTH, rng=rng) for _ in range(layers)]
        for part in parts:  # so that no value grows or shrinks from layer to layer: denormal numbers are slow
            part.weight.data *= 1 / (np.sqrt(WIDTH) * part.weight.data.std())
        units = [paceline.FSDP(part, group, **WAYS[way]) for part in parts]
        model = paceline.FSDP(nn.Sequential(*units), group, **WAYS[way])
        optimizer = paceline.optim.Adam(model, lr=1e-6)
        state = paceline.TrainState(model=model, optimizer=optimizer)
        x = rng.standard_normal((rows, WIDTH)).astype(np.float32)
        committed: dict[int, float] = {}
        session.on_commit(lambda number: committed.__setitem__(number, time.monotonic()))
        first, began = 0, 0.0
        took: list[float] = []
        for step in session.steps(state, total=1 << 30):
            with step:
                if step.number == KILL_AT and step.world == WORLD:
                    pipe.send((step.rank, took[3:], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
                    if step.rank == VICTIM:
                        time.sleep(60)  # the others wait for it in the first layer when it is killed
                began = time.monotonic()
                optimizer.zero_grad()
                if rows:
                    model.backward(model(x) / rows)
                optimizer.step()
            took.append(time.monotonic() - began)
            if step.world < WORLD and not first:
                first = step.number
            if first and step.number > first:
                break
        pipe.send(committed[first])


def run(way: str, layers: int, rows: int) -> tuple[list[float], int, float]:
    """One job; returns seconds of steps, peak bytes of a worker, and seconds from the kill to the next commit."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        address = stack.enter_context(coordinator())
        started = []
        for _ in range(WORLD):
            pipe, theirs = context.Pipe()
            process = context.Process(target=train, args=(address, way, layers, rows, theirs))
            process.start()
            stack.callback(process.join, 20)
            stack.callback(process.kill)
            started.append((process, pipe))
        told = [pipe.recv() for _, pipe in started]
        time.sleep(0.5)
        victim = next(n for n, (rank, *_) in enumerate(told) if rank == VICTIM)
        at = time.monotonic()
        started[victim][0].kill()
        others = [pipe for n, (_, pipe) in enumerate(started) if n != victim]
        commits: list[float] = []
        while len(commits) < GO_ON[way]:  # under HYBRID_SHARD the third one is a spare
            commits += [pipe.recv() - at for pipe in others if pipe.poll(0.02)]
    seconds = [one for _, took, _ in told for one in took]
    return seconds, max(peak for *_, peak in told), max(commits, default=0.0)


def main() -> None:
    """Reads the arguments, and alternates between the ways."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=5, help="4 million parameters each; 20 are 1 GB with moments")
    parser.add_argument("--rows", type=int, default=512, help="0 for steps that compute nothing, to time the recovery")
    asked = parser.parse_args()
    steps: dict[str, list[float]] = {way: [] for way in WAYS}
    kills: dict[str, list[float]] = {way: [] for way in WAYS}
    peaks: dict[str, int] = dict.fromkeys(WAYS, 0)
    for _ in range(asked.rounds):
        for way in WAYS:
            took, peak, after = run(way, asked.layers, asked.rows)
            steps[way].append(statistics.median(took))
            kills[way].append(after)
            peaks[way] = max(peaks[way], peak)
            recovery = f", after a kill {after:.2f} s" if GO_ON[way] else ""
            print(f"{way}: step {steps[way][-1]:.3f} s{recovery}, peak {peak / 1e6:.0f} MB", flush=True)
    base = steps["redundancy=1"]
    for way, found in steps.items():
        ratios = [one / other for one, other in zip(found, base, strict=True)]
        spread = f"{statistics.median(ratios):.3f} times ({min(ratios):.3f} to {max(ratios):.3f})"
        after_kill = (
            f"; after a kill {statistics.median(kills[way]):.2f} s ({min(kills[way]):.2f} to {max(kills[way]):.2f})"
        )
        recovery = after_kill if GO_ON[way] else ""
        print(f"{way}: step {statistics.median(found):.3f} s, {spread}{recovery}; peak {peaks[way] / 1e6:.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
