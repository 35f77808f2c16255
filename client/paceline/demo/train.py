"""The script that `paceline demo` trains with: a user's own looks like this, but for what it notes.

Each worker notes which samples it takes and which steps it has applied, in a file of its own; `paceline.demo.ledger`
checks them afterwards. Every worker holds the whole model and takes its share of each global batch, so the run is the
same for any number of workers, also when some die or join: but for rounding, or with `--microbatches` bit for bit.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from paceline import nn

EPOCHS, PATIENT_EPOCHS, PAUSE_S = 60, 20, 0.05


def load_digits() -> tuple[Any, Any, Any, Any]:
    """Loads scikit-learn's digits, 8 x 8 pixels from 0 to 1, as (x, t, test_x, test_t): a fifth is held back.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    found = find_spec("sklearn")  # not imported: that would take each worker a second
    if found is None or found.origin is None:
        raise ImportError("the digits are part of scikit-learn, which is not installed", name="sklearn")
    with gzip.open(Path(found.origin).with_name("datasets") / "data" / "digits.csv.gz", "rt") as table:
        rows = np.loadtxt(table, delimiter=",")
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    x, t = (rows[:, :-1] / 16).astype(np.float32), rows[:, -1].astype(np.int64)
    kept = len(rows) - len(rows) // 5
    return x[:kept], t[:kept], x[kept:], t[kept:]


def main() -> None:
    """Trains, in as many processes as call it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True, help="how many workers there should be")
    parser.add_argument("--kill-at-step", type=int, default=0, help="the last rank kills itself in this step; 0: none")
    parser.add_argument("--microbatches", type=int, default=0, help="of each step, for the same bits in any world")
    parser.add_argument("--notes", type=Path, required=True, help="a folder")
    asked = parser.parse_args()
    os.environ.setdefault("PACELINE_FLIGHT_DIR", "off")  # the demo kills its workers itself: no dumps
    x, t, test_x, test_t = load_digits()

    with (asked.notes / str(os.getpid())).open("w", buffering=1) as notes, paceline.join() as session:

        def note(**facts: Any) -> None:
            notes.write(json.dumps({**facts, "at": time.monotonic()}) + "\n")

        note(joined=True)
        rng = np.random.default_rng(0)  # all workers begin with the same weights
        wide, narrow, last = (nn.Linear(n, m, rng=rng) for n, m in ((64, 128), (128, 64), (64, 10)))
        model = nn.Sequential(wide, nn.ReLU(), narrow, nn.ReLU(), last)
        ddp = paceline.DDP(model, session.group)  # averages the gradients of all workers
        optimizer = paceline.optim.SGD(ddp, lr=0.05, momentum=0.9)
        sampler = paceline.ElasticSampler(len(x), global_batch=64, microbatches=asked.microbatches)
        # All that a step changes: an undone step restores it, and newcomers receive it.
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        epochs = EPOCHS + asked.kill_at_step // sampler.steps_per_epoch  # enough of them follow the kill
        total = epochs * sampler.steps_per_epoch

        def say_who_trains() -> None:
            if session.rank == 0:
                print(f"step {state.step + 1}: {session.size} worker{'s train' if session.size > 1 else ' trains'}")

        def backward(indices: Any, *weight: float) -> float:
            loss, dy = nn.softmax_cross_entropy(ddp(x[indices]), t[indices])
            ddp.backward(dy, *weight)
            return float(loss)

        def accuracy() -> float:
            return float((model.forward(test_x).argmax(axis=1) == test_t).mean())

        session.on_view(say_who_trains)
        start, loss, may_be_killed = time.monotonic(), 0.0, asked.kill_at_step > 0 and asked.workers > 1
        for step in session.steps(state, total=total):
            where = {"step": step.number, "generation": step.generation, "world": step.world}
            with step:  # undone, and yielded again in the next generation, if a worker is lost inside
                note(**where, took=list(samples(step, sampler)))
                if may_be_killed and step.number >= asked.kill_at_step and step.rank == asked.workers - 1:
                    may_be_killed = False
                    if session.store.add("kills") == 1:  # else it is the worker that replaces the killed one
                        note(**where, killed=step.rank)
                        os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                if asked.microbatches:
                    for micro in step.microbatches:
                        with micro:
                            loss = backward(micro.indices)
                else:
                    loss = backward(step.indices, step.weight)
                optimizer.step()
            if not step.applied:
                continue
            note(**where, applied=True)
            session.log(loss=loss)
            epoch, within = divmod(step.number, sampler.steps_per_epoch)
            if step.rank == 0 and not within and epoch % 5 == epochs % 5:
                print(f"epoch {epoch:2} of {epochs}: loss {loss:.4f}, accuracy {accuracy():.2%}")
            if epoch >= epochs - PATIENT_EPOCHS and step.world < asked.workers:
                time.sleep(PAUSE_S)  # training is nearly done, and a new worker is still on its way
        note(
            digest=state.fingerprint().hex(),
            accuracy=accuracy(),
            world_size=session.size,
            steps=total,
            steps_per_epoch=sampler.steps_per_epoch,
            samples=sampler.n,
            seconds=time.monotonic() - start,
        )


def samples(step: paceline.Step, sampler: paceline.ElasticSampler) -> Iterator[int]:
    """Yields the samples whose gradients this worker gives; its share, or a microbatch, may be one of weight 0."""
    if not sampler.microbatches:
        yield from step.indices.tolist() if step.weight else ()
        return
    for number in (*(micro.number for micro in step.microbatches if not micro.is_check), *step.kept_microbatches):
        indices, weight = sampler.current_microbatch(number)
        yield from indices.tolist() if weight else ()


if __name__ == "__main__":
    main()
