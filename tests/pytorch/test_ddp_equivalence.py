"""Any number of ranks trains the torch model that one process trains, and all hold the same bits (I5)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pytorch.models import N, assert_same_bits, gradients, mlp, samples, train_alone, train_ranks, weights

import paceline
import paceline.torch
from paceline._group import Group
from paceline.testing import run_ranks

pytestmark = pytest.mark.needs(what="torch")

STEPS = 12
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}
cross_entropy = torch.nn.functional.cross_entropy


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_any_world_trains_the_weights_of_one_process(world: int, kind: str) -> None:
    sampler = partial(paceline.ElasticSampler, N, 17, seed=3)  # batches of 17, 17 and 16
    expected = train_alone(mlp(), OPTIMIZERS[kind], sampler(), STEPS)

    # Each rank starts from weights of its own; rank 0's must prevail. Small buckets: several of them.
    ranks = run_ranks(
        world,
        lambda g: train_ranks(g, mlp(g.rank), OPTIMIZERS[kind], sampler(), STEPS, bucket_mb=300 / 2**20),
    )

    assert_same_bits(ranks)
    for path, values in expected.items():
        torch.testing.assert_close(ranks[0][path], values, rtol=1e-9, atol=1e-9)
    if world == 1:
        assert_same_bits([expected, ranks[0]])


def test_more_ranks_than_samples_train_as_one_process() -> None:
    sampler = partial(paceline.ElasticSampler, 7, 3, seed=1)  # batches of 3, 3 and 1 for 4 ranks
    expected = train_alone(mlp(), OPTIMIZERS["sgd"], sampler(), STEPS)

    ranks = run_ranks(4, lambda g: train_ranks(g, mlp(), OPTIMIZERS["sgd"], sampler(), STEPS))

    assert_same_bits(ranks)
    for path, values in expected.items():
        torch.testing.assert_close(ranks[0][path], values, rtol=1e-9, atol=1e-9)


def test_plain_backward_averages_equal_shares() -> None:
    x, t = samples()
    whole = mlp()
    cross_entropy(whole(x[:48]), t[:48]).backward()

    def run(group: Group) -> Any:
        model = paceline.torch.DDP(mlp(group.rank), group)
        mine = slice(group.rank * 12, group.rank * 12 + 12)
        cross_entropy(model(x[mine]), t[mine]).backward()
        return gradients(model)

    ranks = run_ranks(4, run)
    assert_same_bits(ranks)
    torch.testing.assert_close(ranks[0], gradients(whole))


def test_nan_gradients_of_weight_zero_are_ignored() -> None:
    x, t = samples()

    def run(group: Group) -> Any:
        model = paceline.torch.DDP(mlp(), group)
        loss = cross_entropy(model(x), t) * (float("nan") if group.rank else 1.0)
        model.backward(loss, 1.0 - group.rank)
        return gradients(model)

    ranks = run_ranks(2, run)
    alone = mlp()
    cross_entropy(alone(x), t).backward()
    assert_same_bits([gradients(alone), *ranks])


def test_negative_or_nan_weights_raise_value_error() -> None:
    model = paceline.torch.DDP(mlp(), paceline.testing.local_groups(1)[0])
    x, t = samples()
    for weight in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="weight"):
            model.backward(cross_entropy(model(x), t), weight)
    assert all(gradient is None for gradient in gradients(model).values())


@pytest.mark.parametrize("compression", ["bf16", "int8", "powersgd"])
def test_compressed_training_stays_close_to_one_process(compression: str) -> None:
    sampler = partial(paceline.ElasticSampler, N, 25, seed=3)
    expected = train_alone(mlp(), OPTIMIZERS["sgd"], sampler(), STEPS)

    ranks = run_ranks(
        3, lambda g: train_ranks(g, mlp(g.rank), OPTIMIZERS["sgd"], sampler(), STEPS, compression=compression)
    )

    assert_same_bits(ranks)
    for path, values in expected.items():
        torch.testing.assert_close(ranks[0][path], values, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_train_like_one_process(dtype: Any) -> None:
    x, t = samples(dtype)

    def run(group: Group) -> Any:
        model = paceline.torch.DDP(mlp(group.rank, dtype), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            mine = slice(group.rank * 10, group.rank * 10 + 10)
            optimizer.zero_grad()
            model.backward(cross_entropy(model(x[mine]).float(), t[mine]), 10.0)
            assert {p.grad.dtype for p in model.parameters()} == {dtype}
            optimizer.step()
        return weights(model)

    ranks = run_ranks(3, run)
    assert_same_bits(ranks)

    alone = mlp(0, dtype)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(alone(x[:30]).float(), t[:30]).backward()
        optimizer.step()
    for path, values in weights(alone).items():
        torch.testing.assert_close(ranks[0][path], values, rtol=0.03, atol=0.01)
