"""FSDP over gRPC: 20 steps equal one process's, under every strategy, with uneven shares."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from unit.parallel.helpers import N, Weights, mlp, samples, train_alone

from paceline import nn
from paceline._elastic.sampler import ElasticSampler
from paceline._group import Group
from paceline._parallel import FSDP, ShardingStrategy
from paceline.config import Config
from paceline.optim import SGD, Adam
from support.worlds import run_over

STEPS = 20
WITH_SGD, WITH_ADAM = partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=0.01)


@pytest.mark.parametrize(("strategy", "node"), [*((s, None) for s in list(ShardingStrategy)[:3]), ("hybrid_shard", 2)])
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        (WITH_SGD, "float64"),
        pytest.param(WITH_ADAM, "float32", marks=pytest.mark.slow),
        pytest.param(WITH_SGD, "float32", marks=pytest.mark.slow),
        pytest.param(WITH_ADAM, "float64", marks=pytest.mark.slow),
    ],
    ids=["sgd-float64", "adam-float32", "sgd-float32", "adam-float64"],
)
@pytest.mark.sampled(3)
def test_four_ranks_reach_the_parameters_of_one_process(
    strategy: ShardingStrategy, node: int | None, dtype: str, optimizer: partial[SGD | Adam]
) -> None:
    sampler = ElasticSampler(N, 157, seed=3)
    alone = mlp(0, dtype)
    expected = train_alone(alone, optimizer(alone), sampler, STEPS)
    x, labels = samples(dtype)

    def rank(g: Group) -> Weights:
        wrap = partial(FSDP, group=g, strategy=strategy, intra_node_size=node)
        model = mlp(g.rank, dtype)  # rank 0's values must prevail
        fsdp = wrap(nn.Sequential(*(wrap(m) if isinstance(m, nn.Linear) else m for m in model.modules)))
        trained = optimizer(fsdp)
        for step in range(STEPS):
            indices, weight = ElasticSampler(N, 157, seed=3).share(step, g.rank, g.size)
            _, dy = nn.softmax_cross_entropy(fsdp(x[indices]), labels[indices])
            trained.zero_grad()
            fsdp.backward(dy, weight)
            trained.step()
        return fsdp.state_dict()

    tolerance = 1e-12 if dtype == "float64" else 1e-5
    for state in run_over("grpc", 4, rank, config=Config()):
        for path, values in expected.items():
            np.testing.assert_allclose(state[path], values, rtol=tolerance, atol=tolerance)
