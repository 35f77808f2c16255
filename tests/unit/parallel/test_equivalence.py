"""Any number of ranks trains the model that one process without Paceline trains, and all hold the same bits (I5)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from unit.parallel.helpers import N, Weights, gradient, mlp, samples, train_alone, train_ranks

from paceline import nn
from paceline._elastic.sampler import ElasticSampler
from paceline._group import Group
from paceline._parallel import DDP
from paceline._parallel._parameter import HasParameters
from paceline.optim import SGD, Adam, Optimizer
from paceline.testing import run_ranks

STEPS = 24  # eight epochs of batches of 157, 157 and 86: shares differ in every step
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
OPTIMIZERS: dict[str, Callable[[HasParameters], Optimizer]] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": partial(Adam, lr=0.01),
}


def assert_same_bits(ranks: list[Weights]) -> None:
    for rank, other in enumerate(ranks):
        for path, values in ranks[0].items():
            assert values.tobytes() == other[path].tobytes(), f"{path} of rank {rank} differs from rank 0's"


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_trained_weights_match_those_of_one_process(world: int, dtype: str, kind: str) -> None:
    sampler = partial(ElasticSampler, N, 157, seed=3)
    alone = mlp(0, dtype)
    expected = train_alone(alone, OPTIMIZERS[kind](alone), sampler(), STEPS)

    # Each rank starts from weights of its own; rank 0's must prevail. Buckets of 600 bytes: several of them.
    ranks = run_ranks(
        world,
        lambda g: train_ranks(g, mlp(g.rank, dtype), OPTIMIZERS[kind], sampler(), STEPS, bucket_mb=600 / 2**20),
    )

    assert_same_bits(ranks)
    for path, values in expected.items():
        np.testing.assert_allclose(ranks[0][path], values, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if world == 1:
        assert_same_bits([expected, ranks[0]])


def test_more_ranks_than_samples_train_as_one_process() -> None:
    sampler = partial(ElasticSampler, 7, 3, seed=1)  # batches of 3, 3 and 1 for 4 ranks
    alone = mlp()
    expected = train_alone(alone, SGD(alone, lr=0.1, momentum=0.9), sampler(), STEPS)

    ranks = run_ranks(4, lambda g: train_ranks(g, mlp(), partial(SGD, lr=0.1, momentum=0.9), sampler(), STEPS))

    assert_same_bits(ranks)
    for path, values in expected.items():
        np.testing.assert_allclose(ranks[0][path], values, rtol=1e-9, atol=1e-12)


def test_one_rank_gives_the_bits_of_the_unwrapped_module() -> None:
    """Also where the weight is a number of samples, by which float32 cannot multiply and divide without rounding."""
    x, labels = samples("float32")
    plain = mlp(0, "float32")
    plain.backward(nn.softmax_cross_entropy(plain.forward(x[:157]), labels[:157])[1])

    def rank(g: Group) -> Weights:
        ddp = DDP(mlp(0, "float32"), g)
        ddp.backward(nn.softmax_cross_entropy(ddp(x[:157]), labels[:157])[1])
        return {path: gradient(p) for path, p in ddp.named_parameters()}

    assert_same_bits([{path: gradient(p) for path, p in plain.named_parameters()}, *run_ranks(1, rank)])
