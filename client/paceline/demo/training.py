"""The demo's model and its training, for any session: what a user's own script looks like, plus the counting.

Every rank holds the whole model (DDP) and takes its share of each global batch, so the run is the same whatever the
number of workers. B samples in a global batch, n training samples.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import paceline
from paceline import nn, optim
from paceline.demo.data import Digits

__all__ = ["Outcome", "Plan", "build_model", "train"]

Tell = Callable[[str, dict[str, Any]], None]
"""Hears of kinds of news ("step", "epoch") with their facts."""

_TELL_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, and for how long.

    Attributes:
        epochs: passes over the training samples.
        global_batch: B, over all ranks.
        hidden: widths of the hidden layers.
        lr: learning rate.
        momentum: of SGD.
        seed: of the initial weights and the order of samples.
    """

    epochs: int = 60
    global_batch: int = 64
    hidden: tuple[int, ...] = (128, 64)
    lr: float = 0.05
    momentum: float = 0.9
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went; the same on all ranks but for `seconds`.

    Attributes:
        accuracy: share of the held-back samples that are recognised.
        steps: optimizer steps.
        samples_once: every training sample was used exactly once in every epoch; counted, not assumed.
        seconds: from the first step to the last evaluation.
    """

    accuracy: float
    steps: int
    samples_once: bool
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
    """Trains with the other members of the session; all of them call this together.

    Raises:
        PacelineError: a member was lost.
    """
    group, n = session.group, len(digits.train_t)
    ddp = paceline.DDP(build_model(plan), group)
    optimizer = optim.SGD(ddp, lr=plan.lr, momentum=plan.momentum)
    sampler = paceline.ElasticSampler(n, plan.global_batch, plan.seed)
    total = plan.epochs * sampler.steps_per_epoch
    used = np.zeros((plan.epochs, n), np.int32)
    """How often this rank used which sample in which epoch."""
    pace = _Pace(session, total, tell)
    start = time.perf_counter()
    accuracy = 0.0
    for epoch in range(plan.epochs):
        loss_sum = 0.0
        for step in range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch):
            indices, weight = sampler.share(step, group.rank, group.size)
            loss, dy = nn.softmax_cross_entropy(ddp(digits.train_x[indices]), digits.train_t[indices])
            optimizer.zero_grad()
            ddp.backward(dy, weight)
            optimizer.step()
            if weight > 0:
                np.add.at(used[epoch], indices, 1)
                loss_sum += loss * len(indices)
                pace.samples += len(indices)
            pace.tell(step + 1)
        mine = slice(group.rank, None, group.size)
        hits = int((ddp(digits.test_x[mine]).argmax(axis=1) == digits.test_t[mine]).sum())
        loss_sum, correct = group.all_reduce(np.array([loss_sum, hits]))
        accuracy = float(correct) / len(digits.test_t)
        if group.rank == 0:
            tell("epoch", {"epoch": epoch + 1, "of": plan.epochs, "loss": float(loss_sum) / n, "accuracy": accuracy})
    seconds = time.perf_counter() - start
    pace.tell(total, last=True)
    once = bool((group.all_reduce(used) == 1).all())
    return Outcome(accuracy, total, once, seconds)


class _Pace:
    """Tells of this rank's steps, now and then."""

    def __init__(self, session: paceline.Session, total: int, tell: Tell) -> None:
        self.samples = 0
        self._group = session.group
        self._total = total
        self._tell = tell
        self._at, self._step = time.perf_counter(), 0

    def tell(self, step: int, *, last: bool = False) -> None:
        """Step number `step` is done."""
        now = time.perf_counter()
        if now - self._at < _TELL_EVERY_S and not last:
            return
        rate = (step - self._step) / (now - self._at)
        self._at, self._step = now, step
        self._tell(
            "step",
            {
                "step": step,
                "total": self._total,
                "samples": self.samples,
                "rate": rate,
                "bytes_sent": self._group.bytes_sent,
            },
        )
