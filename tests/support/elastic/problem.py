"""What is trained in tests of elastic training, and what one process makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np

import paceline

__all__ = ["BATCH", "SAMPLES", "build", "data", "one_process"]

SAMPLES, BATCH = 45, 11
"""Five batches an epoch, the last one short: with four ranks some shares are empty."""

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


def one_process(total: int, seed: int, batch: int = BATCH) -> list[float]:
    """All large state after so many steps of an undisturbed run in one process."""
    x, t = data()
    model = build(seed)
    optimizer = paceline.optim.Adam(model, lr=0.01)
    sampler = paceline.ElasticSampler(SAMPLES, global_batch=batch)
    state = paceline.TrainState(model=model, optimizer=optimizer)
    for step in range(total):
        indices = sampler.batch(step)
        _, dy = paceline.nn.softmax_cross_entropy(model.forward(x[indices]), t[indices])
        optimizer.zero_grad()
        model.backward(dy)
        optimizer.step()
    return [float(value) for array in state.large() for value in array.reshape(-1)]
