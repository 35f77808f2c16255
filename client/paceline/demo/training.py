"""A worker of `paceline demo`: python -m paceline.demo.training WORKERS KILL_AT_STEP MICROBATCHES.

`train` looks like a user's own script, plus reports for the view. Every rank holds the whole model (DDP) and takes its
share of each global batch, so the run is the same for any number of workers, even if some die or join: but for
rounding, or with microbatches (`paceline demo --same-bits`) bit for bit.
The digits are scikit-learn's: 1797 images of 8 x 8 pixels.
"""

from __future__ import annotations

import gzip
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import paceline
from paceline import nn, optim
from paceline._session.identity import process_identity
from paceline._session.launcher_pipe import tell_launcher

Tell = Callable[[str, dict[str, Any]], None]
"""Takes a report: its kind ("share", "applied", ...) and its facts."""

_EPOCHS = 60

_LAST_EPOCHS = 20
"""Number of last epochs that wait for a new worker, so that training does not end before it joins."""

_PAUSE_S = 0.05

_SPLIT_SEED = 0
"""Seed of the split. All workers must hold back the same samples; the numbers in the README are of this split."""

_WAIT_S = 30.0
"""Seconds that a report waits for a slow launcher. The count of samples needs every report, so training waits."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Images as rows of 64 values from 0 to 1, and labels from 0 to 9; the test samples are never trained on."""

    train_x: NDArray[np.float32]
    train_t: NDArray[np.int64]
    test_x: NDArray[np.float32]
    test_t: NDArray[np.int64]


def load_digits() -> Digits:
    """Loads the digits in a fixed random order; the last fifth is held back for tests.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    # The table is read without an import of scikit-learn, which takes 0.8 s of a processor.
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ImportError("the digits are part of scikit-learn, which is not installed", name="sklearn")
    with gzip.open(Path(found.origin).with_name("datasets") / "data" / "digits.csv.gz", "rt") as table:
        rows = np.loadtxt(table, delimiter=",")
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(rows))
    x = (rows[order, :-1] / 16).astype(np.float32)  # pixels come as 0 to 16
    t = rows[order, -1].astype(np.int64)
    kept = len(t) - len(t) // 5
    return Digits(x[:kept], t[:kept], x[kept:], t[kept:])


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What the demo trains, and for how long.

    Attributes:
        workers: the wanted number of workers.
        kill_at_step: the step in which a worker kills itself; 0 for none.
        global_batch: B, samples in a step over all ranks.
        hidden: widths of the hidden layers.
        lr: learning rate.
        momentum: of SGD.
        seed: seed of the initial weights and the order of samples.
        microbatches: V, microbatches of a step; 0 for none.
    """

    workers: int
    kill_at_step: int = 0
    global_batch: int = 64
    hidden: tuple[int, ...] = (128, 64)
    lr: float = 0.05
    momentum: float = 0.9
    seed: int = 0
    microbatches: int = 0

    def epochs(self, steps_per_epoch: int) -> int:
        """Returns the number of passes over the training samples, so many that enough of them follow the kill."""
        return _EPOCHS + self.kill_at_step // steps_per_epoch


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result of a run; the same on all ranks except `seconds`.

    Attributes:
        accuracy: share of the held-back samples that the model recognises.
        steps: number of optimizer steps.
        world_size: members at the end.
        seconds: seconds from the first step to the last evaluation.
        digest: SHA-256 of the training state after the last step.
    """

    accuracy: float
    steps: int
    world_size: int
    seconds: float
    digest: str


def build_model(plan: DemoPlan) -> nn.Sequential:
    """Builds an MLP from 64 pixels to 10 classes."""
    rng = np.random.default_rng(plan.seed)
    widths = (64, *plan.hidden, 10)
    layers: list[Any] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs, rng=rng), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(session: paceline.Session, digits: Digits, plan: DemoPlan, tell: Tell) -> DemoResult:
    """Trains with the current members of the session.

    Raises:
        Dismissed: this worker was told to leave, or joined after the last step.
        PacelineError: training cannot go on.
    """
    model = build_model(plan)
    ddp = paceline.DDP(model, session.group)
    optimizer = optim.SGD(ddp, lr=plan.lr, momentum=plan.momentum)
    sampler = paceline.ElasticSampler(len(digits.train_t), plan.global_batch, plan.seed, microbatches=plan.microbatches)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    per_epoch = sampler.steps_per_epoch
    total = plan.epochs(per_epoch) * per_epoch
    tell("plan", {"samples": sampler.n, "steps_per_epoch": per_epoch, "total": total})
    session.on_view(lambda: tell("formed", {"generation": session.generation, "world": session.size}))
    killer = _Killer(session, plan, tell)
    patience = _SlowDown(plan.workers, total - _LAST_EPOCHS * per_epoch, tell)
    start = time.perf_counter()

    for step in session.steps(state, total=total):
        where = {"generation": step.generation, "step": step.number}
        with step:
            samples = _samples(step, plan)
            tell("share", {**where, "samples": samples})
            optimizer.zero_grad()
            loss = (
                _in_microbatches(step, ddp, digits, killer)
                if plan.microbatches
                else _at_once(step, ddp, digits, killer)
            )
            optimizer.step()
        if not step.applied:
            tell("undone", where)
            continue
        tell("applied", {**where, "loss": loss, "samples": len(samples), "bytes_sent": session.group.bytes_sent})
        if step.rank == 0 and step.number % per_epoch == 0:
            tell("epoch", {"epoch": step.number // per_epoch, "accuracy": _accuracy(model, digits)})
        patience.between_steps(step)

    # All ranks hold the same weights, so each can evaluate alone.
    accuracy = _accuracy(model, digits)
    return DemoResult(accuracy, total, session.size, time.perf_counter() - start, state.fingerprint().hex())


def _samples(step: paceline.Step, plan: DemoPlan) -> list[int]:
    """Returns the samples whose gradients this rank gives; a rank or microbatch without one gets one of weight 0."""
    if plan.microbatches:
        own = [micro.number for micro in step.microbatches if not micro.is_check]
        return [int(i) for number in sorted([*own, *step.kept_microbatches]) for i in _of_part(step.sampler, number)]
    return step.indices.tolist() if step.weight else []


def _of_part(sampler: paceline.ElasticSampler, number: int) -> list[int]:
    indices, weight = sampler.current_microbatch(number)
    return indices.tolist() if weight else []


def _at_once(step: paceline.Step, ddp: paceline.DDP, digits: Digits, killer: _Killer) -> float:
    """Computes this rank's share of the batch; returns the loss."""
    loss, dy = nn.softmax_cross_entropy(ddp(digits.train_x[step.indices]), digits.train_t[step.indices])
    killer.may_kill(step)
    ddp.backward(dy, step.weight)
    return float(loss)


def _in_microbatches(step: paceline.Step, ddp: paceline.DDP, digits: Digits, killer: _Killer) -> float:
    """Computes this rank's microbatches, which have the same bits on any worker; returns their mean loss."""
    total = weight = 0.0
    for micro in step.microbatches:
        with micro:
            loss, dy = nn.softmax_cross_entropy(ddp(digits.train_x[micro.indices]), digits.train_t[micro.indices])
            killer.may_kill(step)
            ddp.backward(dy)
        total, weight = total + float(loss) * micro.weight, weight + micro.weight
    return total / weight if weight else 0.0


def _accuracy(model: nn.Sequential, digits: Digits) -> float:
    return float((model.forward(digits.test_x).argmax(axis=1) == digits.test_t).mean())


class _Killer:
    """Kills the worker of the highest rank once in a job, as `kill -9` would."""

    def __init__(self, session: paceline.Session, plan: DemoPlan, tell: Tell) -> None:
        self._store = session.store
        self._plan = plan
        self._tell = tell
        self._armed = plan.kill_at_step > 0 and plan.workers > 1  # without a second worker nobody could go on

    def may_kill(self, step: paceline.Step) -> None:
        """Kills this worker if it is its turn, between forward and backward: the others now wait for its gradients."""
        if not self._armed or step.number < self._plan.kill_at_step:
            return
        if step.rank != step.world - 1 or step.world < self._plan.workers:
            return
        self._armed = False
        if self._store.add("kills") > 1:  # this worker replaces the killed one
            return
        self._tell("killing", {"generation": step.generation, "step": step.number, "rank": step.rank})
        os.kill(os.getpid(), signal.SIGKILL)


class _SlowDown:
    """Slows down the last steps while a worker is missing, so that its replacement can join before training ends.

    A few workers on a fast machine may finish all steps before a new Python process has started.
    """

    def __init__(self, workers: int, after: int, tell: Tell) -> None:
        self._workers = workers
        self._after = after
        self._tell = tell
        self._said = False

    def between_steps(self, step: paceline.Step) -> None:
        """Pauses if a worker is missing and few steps are left; all members pause alike."""
        if step.number < self._after or step.world >= self._workers:
            return
        if not self._said and step.rank == 0:
            self._said = True
            self._tell("pauses", {"pause_ms": round(_PAUSE_S * 1e3)})
        time.sleep(_PAUSE_S)


def main() -> None:
    """Joins, trains, and reports to the launcher."""
    began = _began()
    os.environ.setdefault("PACELINE_FLIGHT_DIR", "off")  # the demo kills its workers itself
    workers, kill_at_step, microbatches = (int(argument) for argument in sys.argv[1:])
    digits = load_digits()
    _tell("ready", {})
    with paceline.join() as session:
        _tell("joined", {"began": began})
        outcome = train(session, digits, DemoPlan(workers, kill_at_step, microbatches=microbatches), _tell)
        if session.rank == 0:
            _tell("result", asdict(outcome))


def _tell(kind: str, facts: dict[str, Any]) -> None:
    """Sends the launcher a report with the time, on the clock that all processes of this machine share."""
    tell_launcher(kind, {**facts, "at": time.monotonic()}, wait_s=_WAIT_S)


def _began() -> float:
    """Returns the time at which this process started, to 10 ms; the current time if the system does not tell."""
    ticks, now = process_identity().start_ticks, time.monotonic()
    if not ticks or not hasattr(time, "CLOCK_BOOTTIME"):
        return now
    return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


if __name__ == "__main__":
    main()
