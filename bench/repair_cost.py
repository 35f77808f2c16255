"""Measures how much work is done again if a worker is killed in the middle of a step: `python bench/repair_cost.py`.

Four workers take steps of 16 microbatches, each of which sleeps for a quarter of a second in place of computing, so a
quiet step takes a second. At each tenth of a step one worker is killed, and another one joins afterwards. Printed are,
for each kill:

- the seconds of work that were done again, for each survivor: what all workers have spent on the step's microbatches,
  less what a quiet step takes, over the survivors;
- the seconds from the beginning of the step until the last survivor has applied it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

WORLD = 4


class Worker:
    """A worker process and what it has told."""

    def __init__(self, address: str, microbatches: int, seconds: float) -> None:
        variables = {"PACELINE_COORDINATOR": address, "PACELINE_JOB": "repair", "PACELINE_MIN_WORKERS": "1"}
        variables |= {"PACELINE_MAX_WORKERS": str(WORLD), "OMP_NUM_THREADS": "1", "PACELINE_FLIGHT_DIR": "off"}
        command = [sys.executable, __file__, "--worker", "--microbatches", str(microbatches), "--seconds", str(seconds)]
        self.process = subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
        self.told: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told.append(json.loads(line))

    def of(self, kind: str, step: int) -> list[dict[str, Any]]:
        """The report of one step."""
        return [event for event in list(self.told) if event["event"] == kind and event["step"] == step]


def work(microbatches: int, seconds: float) -> None:
    """A worker."""
    import paceline
    from paceline import nn

    def emit(event: str, **facts: Any) -> None:
        os.write(1, (json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n").encode())

    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((64, 8)).astype("f4"), rng.integers(0, 4, 64)
    with paceline.join() as session:
        ddp = paceline.DDP(nn.Linear(8, 4, rng=rng), session.group)
        optimizer = paceline.optim.Adam(ddp, lr=0.01)
        sampler = paceline.ElasticSampler(64, global_batch=32, microbatches=microbatches)
        state = paceline.TrainState(model=ddp, optimizer=optimizer, sampler=sampler)
        for step in session.steps(state, total=10_000):
            with step:
                emit("step", step=step.number, world=step.world, rank=step.rank)
                optimizer.zero_grad()
                for micro in step.microbatches:
                    with micro:
                        emit("microbatch", step=step.number, microbatch=micro.number)
                        time.sleep(seconds)
                        emit("slept", step=step.number, microbatch=micro.number)
                        _, dy = nn.softmax_cross_entropy(ddp(x[micro.indices]), t[micro.indices])
                        ddp.backward(dy)
                optimizer.step()
            if step.applied:
                emit("applied", step=step.number)


def spent(worker: Worker, step: int, until: float) -> float:
    """Seconds that a worker has spent on the microbatches of a step."""
    begun, ended = worker.of("microbatch", step), worker.of("slept", step)
    ends = [event["at"] for event in ended] + [until] * (len(begun) - len(ended))
    return sum(end - event["at"] for event, end in zip(begun, ends, strict=True))


def kill_at(workers: list[Worker], tenth: int, microbatches: int, seconds: float) -> tuple[float, float]:
    """Kills one worker at that tenth of the next step in which all take part; returns what it cost."""
    last = max(event["step"] for worker in workers for event in worker.told if event["event"] == "step")
    step = last + 1
    while not all(any(event["world"] == WORLD for event in worker.of("step", step)) for worker in workers):
        if any(worker.of("applied", step) for worker in workers):
            step += 1
        time.sleep(0.001)
    begun = max(worker.of("step", step)[0]["at"] for worker in workers)
    victim = next(worker for worker in workers if worker.of("step", step)[0]["rank"] == 1 + tenth % 3)
    at = begun + tenth / 10 * microbatches / WORLD * seconds
    time.sleep(max(0.0, at - time.monotonic()))
    victim.process.kill()
    killed = time.monotonic()
    victim.process.wait()
    others = [worker for worker in workers if worker is not victim]
    while not all(worker.of("applied", step) for worker in others):
        time.sleep(0.001)
    done = max(worker.of("applied", step)[0]["at"] for worker in others)
    total = spent(victim, step, killed) + sum(spent(worker, step, done) for worker in others)
    workers.remove(victim)
    return (total - microbatches * seconds) / len(others), done - begun


def main() -> None:
    """Starts workers, or is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.25, help="of a microbatch")
    parser.add_argument("--worker", action="store_true", help="for the workers")
    wanted = parser.parse_args()
    if wanted.worker:
        work(wanted.microbatches, wanted.seconds)
        return
    from paceline.testing import coordinator

    with coordinator() as address:
        workers = [Worker(address, wanted.microbatches, wanted.seconds) for _ in range(WORLD)]
        try:
            again = []
            for tenth in range(1, 11):
                while not all(any(e["event"] == "step" and e["world"] == WORLD for e in w.told) for w in workers):
                    time.sleep(0.01)
                seconds, took = kill_at(workers, tenth, wanted.microbatches, wanted.seconds)
                again.append(seconds)
                print(f"killed at {tenth / 10:.1f}: {seconds:.2f} s done again, step took {took:.2f} s", flush=True)
                workers.append(Worker(address, wanted.microbatches, wanted.seconds))
            print(f"at most {max(again):.2f} s for each survivor")
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.wait()


if __name__ == "__main__":
    main()
