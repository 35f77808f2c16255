"""A GAN in `session.steps`: two models, two optimizers, two updates in one step; all of them count, or none."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from unit.elastic.solo import ENVIRONMENT, fail

import paceline
from paceline.testing import coordinator
from support.processes import workers

pytestmark = pytest.mark.needs(what="torch")

GAN = """
import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)

class Gan:
    '''Draws points like those of `real`, shape [40, 2]; `wrap` makes what is trained of each of the two models.'''

    def __init__(self, wrap):
        torch.manual_seed(0)
        self.real = torch.randn(40, 2, dtype=torch.float64) @ torch.tensor([[2.0, 1.0], [0.0, 0.5]]).double() + 3
        self.noise = torch.randn(40, 3, dtype=torch.float64)
        self.draw = wrap(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double())
        self.judge = wrap(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double())
        self.drawing = torch.optim.Adam(self.draw.parameters(), lr=0.02)
        self.judging = torch.optim.Adam(self.judge.parameters(), lr=0.02)

    def train_judge(self, indices):
        self.judging.zero_grad()
        false = self.draw(self.noise[indices]).detach()
        (F.softplus(-self.judge(self.real[indices])) + F.softplus(self.judge(false))).mean().backward()
        self.judging.step()

    def train_draw(self, indices):
        self.drawing.zero_grad()
        loss = F.softplus(-self.judge(self.draw(self.noise[indices]))).mean()
        loss.backward()
        self.drawing.step()
        return loss.detach()

    def weights(self):
        return [p.tolist() for model in (self.draw, self.judge) for p in model.parameters()]
"""

exec(GAN)
Gan: Any = globals()["Gan"]
SAMPLER = paceline.ElasticSampler(40, global_batch=12)


def in_one_process(total: int) -> list[Any]:
    gan = Gan(lambda net: net)
    for number in range(total):
        gan.train_judge(SAMPLER.batch(number))
        gan.train_draw(SAMPLER.batch(number))
    return list(gan.weights())


def check(weights: list[Any], total: int) -> None:
    for found, expected in zip(weights, in_one_process(total), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    with torch.random.fork_rng(), paceline.join() as joined:
        yield joined


def test_a_failure_between_two_updates_undoes_both(session: Any) -> None:
    gan = Gan(lambda net: paceline.torch.DDP(net, session.group))
    state = paceline.TrainState(draw=gan.draw, judge=gan.judge, drawing=gan.drawing, judging=gan.judging)
    attempts = 0
    for step in session.steps(state, total=4):
        with step:
            attempts += 1
            indices = SAMPLER.batch(step.number - 1)
            step.keep_copy()
            gan.train_judge(indices)
            if step.number in (1, 3) and step.attempt == 1:
                fail(session)
            gan.train_draw(indices)
            if step.number == 4 and step.attempt == 1:
                fail(session)
    assert attempts == 7
    check(gan.weights(), 4)


def test_a_second_update_without_keep_copy_raises_step_order_error(session: Any) -> None:
    gan = Gan(lambda net: paceline.torch.DDP(net, session.group))
    state = paceline.TrainState(draw=gan.draw, judge=gan.judge, drawing=gan.drawing, judging=gan.judging)
    steps = session.steps(state, total=4)
    with next(steps):
        gan.train_judge(np.arange(12))
        with pytest.raises(paceline.StepOrderError, match=r"that of a GAN, calls step\.keep_copy\(\)"):
            gan.train_draw(np.arange(12))
    steps.close()


WORKER = (
    GAN
    + """
from paceline.torch import DDP

TOTAL = 8
emit("ready")
wait_for_go()
with paceline.join() as session:
    gan = Gan(lambda net: DDP(net, session.group))
    sampler = paceline.ElasticSampler(40, global_batch=12)
    state = paceline.TrainState(
        draw=gan.draw, judge=gan.judge, drawing=gan.drawing, judging=gan.judging, sampler=sampler
    )
    undone = 0
    for step in session.steps(state, total=TOTAL):
        with step:
            step.keep_copy()
            gan.train_judge(step.indices)
            if (step.number, step.world, step.rank) == (4, 3, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = gan.train_draw(step.indices)
            session.group.all_reduce(loss.numpy() * step.weight)
        undone += not step.applied
    emit("done", weights=gan.weights(), undone=undone)
"""
)


@pytest.mark.slow
def test_survivors_train_on_after_a_kill_between_two_updates() -> None:
    with (
        coordinator(settle_time=20.0) as address,  # all begin together
        workers(3, WORKER, COORDINATOR=address, MIN_WORKERS="2", MAX_WORKERS="3") as started,
    ):
        for worker in started:
            worker.expect("ready", timeout=40.0)
        for worker in started:
            worker.go()
        left = [worker for worker in started if worker.wait(40.0) != -signal.SIGKILL]
        ends = [worker.expect("done") for worker in left]
    assert len(ends) == 2
    for end in ends:
        assert end["undone"] >= 1
        assert end["weights"] == ends[0]["weights"]
        check(end["weights"], 8)
