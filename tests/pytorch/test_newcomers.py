"""A layer that was unfrozen while training: a newcomer that has built it frozen trains it as the others do."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.testing import coordinator
from support.processes import workers

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.slow]

NET = """
import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)

class Training:
    def __init__(self, wrap):
        torch.manual_seed(0)
        self.x, self.t = torch.randn(40, 3, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.net[0].requires_grad_(False)
        self.model = wrap(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def step(self, number, indices):
        if number == 3:
            self.net[0].requires_grad_(True)
        self.optimizer.zero_grad()
        F.mse_loss(self.model(self.x[indices]), self.t[indices]).backward()
        self.optimizer.step()

    def weights(self):
        return [p.tolist() for p in self.net.parameters()]
"""

exec(NET)
Training: Any = globals()["Training"]
TOTAL = 9

WORKER = f"""
{NET}
from paceline.torch import DDP

emit("ready")
wait_for_go()
with paceline.join() as session:
    training = Training(lambda net: DDP(net, session.group))
    sampler = paceline.ElasticSampler(40, global_batch=12)
    state = paceline.TrainState(model=training.model, optimizer=training.optimizer, sampler=sampler)
    numbers = []
    for step in session.steps(state, total={TOTAL}):
        with step:
            training.step(step.number, step.indices)
        numbers.extend([step.number] * step.applied)
        if (step.number, numbers[0]) == (5, 1):
            emit("trains", rank=step.rank)
            if step.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    emit("done", numbers=numbers, weights=training.weights())
"""


def in_one_process() -> list[Any]:
    training, sampler = Training(lambda net: net), paceline.ElasticSampler(40, global_batch=12)
    for number in range(1, TOTAL + 1):
        training.step(number, sampler.batch(number - 1))
    return list(training.weights())


def test_a_replacement_trains_a_layer_that_was_built_frozen() -> None:
    environment = {"MIN_WORKERS": "2", "MAX_WORKERS": "2"}
    with coordinator() as address, workers(3, WORKER, COORDINATOR=address, **environment) as started:
        for worker in started:
            worker.expect("ready", timeout=40.0)
        first, spare = started[:2], started[2]
        for worker in first:
            worker.go()
        ranks = {worker.expect("trains")["rank"]: worker for worker in first}
        assert ranks[1].wait() == -signal.SIGKILL
        spare.go()
        ends = [ranks[0].expect("done"), spare.expect("done")]
        assert [ranks[0].wait(), spare.wait()] == [0, 0]
    assert ends[0]["numbers"] == list(range(1, TOTAL + 1))
    assert ends[1]["numbers"] == list(range(ends[1]["numbers"][0], TOTAL + 1))
    assert ends[1]["numbers"][0] > 4
    assert ends[0]["weights"] == ends[1]["weights"]
    for found, expected in zip(ends[0]["weights"], in_one_process(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
