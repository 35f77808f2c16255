"""What the block of a microbatch leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import paceline
from paceline._elastic.state import StateCore
from paceline.errors import SizeMismatch
from paceline.nn import Linear, softmax_cross_entropy

X = np.random.default_rng(1).standard_normal((30, 5)).astype("f4")
T = np.arange(30) % 3


def train(inside: Callable[[Any, Any, Callable[[Any], None]], None], microbatches: int = 4) -> list[float]:
    """Two steps of one process. `inside` gets the step, the group, and what computes a batch.

    Returns:
        The weight of gradients before each step.
    """
    weights = []
    with paceline.join() as session:
        ddp = paceline.DDP(Linear(5, 3, rng=np.random.default_rng(0)), session.group)
        optimizer = paceline.optim.Adam(ddp, lr=0.1)
        sampler = paceline.ElasticSampler(30, global_batch=11, microbatches=microbatches)

        def compute(batch: Any) -> None:
            _, dy = softmax_cross_entropy(ddp(X[batch.indices]), T[batch.indices])
            ddp.backward(dy)

        for step in session.steps(paceline.TrainState(model=ddp, optimizer=optimizer, sampler=sampler), total=2):
            weights.append(session.group._core.gradient_weight)
            with step:
                optimizer.zero_grad()
                inside(step, session.group, compute)
                optimizer.step()
    return weights


def test_a_microbatch_whose_prepare_failed_can_be_entered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, failing = StateCore.prepare, iter([True])

    def prepare(state: StateCore) -> None:
        if next(failing, False):
            raise SizeMismatch("the models differ")
        honest(state)

    monkeypatch.setattr(StateCore, "prepare", prepare)

    def inside(step: Any, _: Any, compute: Callable[[Any], None]) -> None:
        if step.number == 1:
            with pytest.raises(SizeMismatch):
                step.microbatches[0].__enter__()
        for micro in step.microbatches:
            with micro:
                compute(micro)

    assert len(train(inside)) == 2


def test_the_gradient_weight_is_reset_after_a_microbatch() -> None:
    def inside(step: Any, group: Any, compute: Callable[[Any], None]) -> None:
        for micro in step.microbatches:
            with micro:
                compute(micro)
                assert group._core.gradient_weight == micro.weight
            assert group._core.gradient_weight == 1.0

    assert train(inside) == [1.0, 1.0]


def test_the_gradient_weight_is_reset_after_a_step() -> None:
    def inside(step: Any, group: Any, compute: Callable[[Any], None]) -> None:
        compute(step)
        group._core.set_gradient_weight(0.5)

    assert train(inside, microbatches=0) == [1.0, 1.0]
