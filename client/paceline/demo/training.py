"""The demo's model and its training, for any session: what a user's own script looks like, plus telling of it.

Every rank holds the whole model (DDP) and takes its share of each global batch, so the run is the same whatever the
number of workers, and whoever dies and comes meanwhile. B samples in a global batch, n training samples.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import paceline
from paceline import nn, optim
from paceline.demo.data import Digits

__all__ = ["Outcome", "Plan", "Tell", "build_model", "train"]

Tell = Callable[[str, dict[str, Any]], None]
"""Hears of kinds of news ("share", "applied", ...) with their facts."""

_EPOCHS = 60

_LAST_EPOCHS = 20
"""Before these a new worker should be there: training would be over else, with nobody to see it come in."""

_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, and for how long.

    Attributes:
        workers: how many there should be.
        kill_at_step: the step in which one of them kills itself; 0 for none.
        global_batch: B, over all ranks.
        hidden: widths of the hidden layers.
        lr: learning rate.
        momentum: of SGD.
        seed: of the initial weights and the order of samples.
    """

    workers: int
    kill_at_step: int = 0
    global_batch: int = 64
    hidden: tuple[int, ...] = (128, 64)
    lr: float = 0.05
    momentum: float = 0.9
    seed: int = 0

    def epochs(self, steps_per_epoch: int) -> int:
        """Passes over the training samples: enough of them follow on the kill."""
        return _EPOCHS + self.kill_at_step // steps_per_epoch


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went; the same on all ranks but for `seconds`.

    Attributes:
        accuracy: share of the held-back samples that are recognised.
        steps: optimizer steps.
        world_size: members at the end.
        seconds: from the first step to the last evaluation.
    """

    accuracy: float
    steps: int
    world_size: int
    seconds: float


def build_model(plan: Plan) -> nn.Sequential:
    """An MLP from 64 pixels to 10 classes."""
    rng = np.random.default_rng(plan.seed)
    widths = (64, *plan.hidden, 10)
    layers: list[Any] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs, rng=rng), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(session: paceline.Session, digits: Digits, plan: Plan, tell: Tell) -> Outcome:
    """Trains with the other members of the session, whoever they are at the time.

    Raises:
        Dismissed: this worker was told to leave, or came when all was done.
        PacelineError: training cannot go on.
    """
    model = build_model(plan)
    ddp = paceline.DDP(model, session.group)
    optimizer = optim.SGD(ddp, lr=plan.lr, momentum=plan.momentum)
    sampler = paceline.ElasticSampler(len(digits.train_t), plan.global_batch, plan.seed)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    per_epoch = sampler.steps_per_epoch
    total = plan.epochs(per_epoch) * per_epoch
    tell("plan", {"samples": sampler.n, "steps_per_epoch": per_epoch, "total": total})
    session.on_view(lambda: tell("formed", {"generation": session.generation, "world": session.size}))
    killer = _Killer(session, plan, tell)
    patience = _Patience(plan.workers, total - _LAST_EPOCHS * per_epoch, tell)
    start = time.perf_counter()

    for step in session.steps(state, total=total):
        where = {"generation": step.generation, "step": step.number}
        with step:
            samples = len(step.indices) if step.weight else 0  # a rank without a sample is given one that counts 0
            tell("share", {**where, "samples": step.indices[:samples].tolist()})
            loss, dy = nn.softmax_cross_entropy(ddp(digits.train_x[step.indices]), digits.train_t[step.indices])
            optimizer.zero_grad()
            killer.may_kill(step)
            ddp.backward(dy, step.weight)
            optimizer.step()
        if not step.applied:
            tell("undone", where)
            continue
        tell("applied", {**where, "loss": float(loss), "samples": samples, "bytes_sent": session.group.bytes_sent})
        if step.rank == 0 and step.number % per_epoch == 0:
            tell("epoch", {"epoch": step.number // per_epoch, "accuracy": _accuracy(model, digits)})
        patience.between_steps(step)

    # Everybody holds the same weights: nobody has to be asked.
    accuracy = _accuracy(model, digits)
    return Outcome(accuracy, total, session.size, time.perf_counter() - start)


def _accuracy(model: nn.Sequential, digits: Digits) -> float:
    return float((model.forward(digits.test_x).argmax(axis=1) == digits.test_t).mean())


class _Killer:
    """Kills the worker of the highest rank once in the life of a job, as `kill -9` would."""

    def __init__(self, session: paceline.Session, plan: Plan, tell: Tell) -> None:
        self._store = session.store
        self._plan = plan
        self._tell = tell
        self._armed = plan.kill_at_step > 0 and plan.workers > 1  # a single worker would leave nobody to go on

    def may_kill(self, step: paceline.Step) -> None:
        """Between forward and backward: the others wait for this worker's gradients now."""
        if not self._armed or step.number < self._plan.kill_at_step:
            return
        if step.rank != step.world - 1 or step.world < self._plan.workers:
            return
        self._armed = False
        if self._store.add("kills") > 1:  # this is the worker that has come in place of the killed one
            return
        self._tell("killing", {"generation": step.generation, "step": step.number, "rank": step.rank})
        os.kill(os.getpid(), signal.SIGKILL)


class _Patience:
    """Gives a new worker the time to come in before the training is over, and says so.

    A few workers on a fast machine can be done with all steps before a new Python process has started.
    """

    def __init__(self, workers: int, after: int, tell: Tell) -> None:
        self._workers = workers
        self._after = after
        self._tell = tell
        self._said = False

    def between_steps(self, step: paceline.Step) -> None:
        """Pauses if a worker is lacking and not much is left to do; all members do so alike."""
        if step.number < self._after or step.world >= self._workers:
            return
        if not self._said and step.rank == 0:
            self._said = True
            self._tell("pauses", {"pause_ms": round(_PAUSE_S * 1e3)})
        time.sleep(_PAUSE_S)
