"""What is trained in tests of elastic training, and what one process makes of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

import paceline

__all__ = ["BATCH", "RATE", "SAMPLES", "build", "data", "decay", "one_process"]

SAMPLES, BATCH = 45, 11
"""Five batches an epoch, the last one short: with four ranks some shares are empty."""

RATE = 0.01
"""Of learning."""

_CLASSES, _INPUTS = 3, 6


def data() -> tuple[Any, Any]:
    """Inputs and labels."""
    rng = np.random.default_rng(7)
    return rng.standard_normal((SAMPLES, _INPUTS)), rng.integers(0, _CLASSES, SAMPLES)


def build(seed: int, hidden: int = 16) -> Any:
    """The model in float64; workers build it from seeds of their own, and take rank 0's."""
    rng = np.random.default_rng(seed)
    return paceline.nn.Sequential(
        paceline.nn.Linear(_INPUTS, hidden, rng=rng, dtype=np.float64),
        paceline.nn.ReLU(),
        paceline.nn.Linear(hidden, _CLASSES, rng=rng, dtype=np.float64),
    )


def decay(step: int) -> float:
    """What a scheduler makes of the learning rate, after so many steps."""
    return 1 / (1 + step / 10)


def one_process(
    steps: Collection[int], seed: int, batch: int = BATCH, *, scheduled: bool = False
) -> tuple[list[float], dict[int, list[float]]]:
    """An undisturbed run in one process.

    Args:
        steps: those after which the state is wanted; the last of them is the last of the run.
        seed: of the model.
        batch: samples of a step, but the last one of an epoch.
        scheduled: whether the learning rate decays.

    Returns:
        The loss of each step before its update, from step 1 on; and all large state after each of `steps`.
    """
    x, t = data()
    model = build(seed)
    optimizer = paceline.optim.Adam(model, lr=RATE)
    sampler = paceline.ElasticSampler(SAMPLES, global_batch=batch)
    state = paceline.TrainState(model=model, optimizer=optimizer)
    losses: list[float] = []
    found: dict[int, list[float]] = {}
    for step in range(max(steps) + 1):
        if step in steps:
            found[step] = [float(value) for array in state._core.large() for value in array.reshape(-1)]
        if step < max(steps):
            indices = sampler.batch(step)
            loss, dy = paceline.nn.softmax_cross_entropy(model.forward(x[indices]), t[indices])
            losses.append(float(loss))
            optimizer.zero_grad()
            model.backward(dy)
            if scheduled:
                optimizer.lr = RATE * decay(step)
            optimizer.step()
    return losses, found
