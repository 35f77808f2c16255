"""A worker alone, and a small model to train."""

from __future__ import annotations

from typing import Any

import numpy as np

import paceline
from paceline._elastic.train_state import TrainState
from paceline._links.fault import Suspicion
from pacelinepb.v1.errors_pb2 import ErrorReason

SAMPLES, BATCH = 10, 4

ENVIRONMENT = ("COORDINATOR", "JOB", "MIN_WORKERS", "MAX_WORKERS", "RANK", "WORLD_SIZE")


class Training:
    """A model in a training state."""

    def __init__(self, sampler: paceline.ElasticSampler | None = None) -> None:
        rng = np.random.default_rng(3)
        self.x, self.t = rng.standard_normal((SAMPLES, 5)), rng.integers(0, 3, SAMPLES)
        self.model = paceline.nn.Linear(5, 3, rng=rng, dtype=np.float64)
        self.optimizer = paceline.optim.Adam(self.model, lr=0.1)
        self.sampler = sampler or paceline.ElasticSampler(SAMPLES, global_batch=BATCH)
        self.steps: list[Any] = []
        self.notes: dict[str, Any] = {"seen": 0}
        self.state = TrainState(model=self.model, optimizer=self.optimizer, sampler=self.sampler, notes=self.notes)

    def compute(self, indices: Any) -> None:
        """Forward and backward."""
        self.notes["seen"] += 1
        _, dy = paceline.nn.softmax_cross_entropy(self.model.forward(self.x[indices]), self.t[indices])
        self.optimizer.zero_grad()
        self.model.backward(dy)

    def train(self, step: Any) -> None:
        """What is done in a step."""
        self.compute(step.indices)
        self.optimizer.step()

    def run(self, session: Any, total: int, *, inside: Any = None, after: Any = None, **settings: Any) -> Training:
        """All steps; `inside` is done in each, in place of `train`, and `after` behind each."""
        for step in session.steps(self.state, total=total, **settings):
            self.steps.append(step)
            with step:
                (inside or self.train)(step)
            if after is not None:
                after(step)
        return self

    @property
    def weights(self) -> Any:
        return self.model.weight.data.copy()


def undisturbed(total: int) -> Any:
    """The weights after so many steps."""
    with paceline.join() as session:
        return Training().run(session, total).weights


def writing_at_once(session: Any) -> Any:
    """The session; each checkpoint is on disk before the next step goes on, however slow the disk."""
    session.on_commit(lambda _: session._line._saver.wait())
    return session


def fail(session: Any, text: str = "a peer is gone") -> None:
    """The generation fails, as if a member had been lost."""
    session.group._core.mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_LOST, 0, 0, text))
