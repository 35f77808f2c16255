"""Whatever is spread over however many ranks, they train the model that one process trains, and agree to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from unit.parallel.helpers import Array, Weights, weights
from unit.parallel.sharding.models import chosen, close, data, layers, net, same_bits, squared, strategies, wrap

from paceline import nn
from paceline._elastic.sampler import ElasticSampler
from paceline._group import Group
from paceline._parallel import FSDP, Parameter, ShardingStrategy
from paceline._parallel._parameter import HasParameters
from paceline.optim import SGD, Adam, Optimizer
from paceline.testing import run_ranks
from support.turns import by_turns

STEPS, SAMPLES, BATCH = 20, 23, 11  # batches of 11, 11 and 1: shares are uneven, and some ranks get no sample
OPTIMIZERS: dict[str, Callable[[HasParameters], Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": partial(Adam, lr=0.01),
}
CASES = [(world, name) for world in (1, 2, 3, 4, 8) for name in strategies(world)]
Result = tuple[list[float], Weights]


def alone(module: Any, kind: str, dtype: str = "float64", steps: int = STEPS) -> Result:
    """One process without Paceline."""
    x, t = data(SAMPLES, dtype)
    sampler, optimizer, losses = ElasticSampler(SAMPLES, BATCH, seed=3), OPTIMIZERS[kind](module), []
    for step in range(steps):
        indices = sampler.batch(step)
        loss, dy = squared(module.forward(x[indices]), t[indices])
        optimizer.zero_grad()
        module.backward(dy)
        optimizer.step()
        losses.append(loss)
    return losses, weights(module)


def spread(fsdp: FSDP, group: Group, kind: str, dtype: str = "float64", steps: int = STEPS) -> Result:
    """One of several ranks: the loss of all samples in each step, and the state in the end."""
    x, t = data(SAMPLES, dtype)
    sampler, optimizer, losses = ElasticSampler(SAMPLES, BATCH, seed=3), OPTIMIZERS[kind](fsdp), []
    for step in range(steps):
        indices, weight = sampler.share(step, group.rank, group.size)
        loss, dy = squared(fsdp(x[indices]), t[indices])
        optimizer.zero_grad()
        fsdp.backward(dy, weight)
        optimizer.step()
        losses.append(loss * weight)
    return np.asarray(group.all_reduce(np.array(losses))).tolist(), fsdp.state_dict()


def check(ranks: list[Result], expected: Result, tolerance: float) -> None:
    same_bits([state for _, state in ranks])
    for losses, _ in ranks:
        np.testing.assert_allclose(losses, expected[0], rtol=tolerance, atol=tolerance)
    close(ranks[0][1], expected[1], tolerance)
    if len(ranks) == 1:
        assert ranks[0][0] == expected[0]
        same_bits([expected[1], ranks[0][1]])


@pytest.mark.parametrize(
    ("world", "name", "kind", "units"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case[0] == 8 else [])
        for case in by_turns(CASES, [("sgd", "some"), ("adam", "some"), ("adam", "one")])
    ],
)
def test_same_as_one_process(world: int, name: str, kind: str, units: str) -> None:
    """Each rank starts from weights of its own; rank 0's must prevail."""

    def rank(g: Group) -> Result:
        return spread(wrap(layers(g.rank), g, units, **chosen(name)), g, kind)

    check(run_ranks(world, rank), alone(net(), kind), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "name", "kind"), by_turns([case for case in CASES if case[0] in (1, 3, 4)], [("sgd",), ("adam",)])
)
def test_same_as_one_process_in_single_precision(world: int, name: str, kind: str) -> None:
    def rank(g: Group) -> Result:
        return spread(wrap(layers(g.rank, "float32"), g, "each", **chosen(name)), g, kind, "float32")

    check(run_ranks(world, rank), alone(net(0, "float32"), kind, "float32"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), [case for case in CASES if case[0] in (1, 2, 4)])
def test_two_dtypes_in_one_unit(world: int, name: str) -> None:
    """float64 weights and float32 biases."""

    def rank(g: Group) -> Result:
        return spread(wrap(layers(g.rank, "float64", "float32"), g, "some", **chosen(name)), g, "sgd")

    ranks = run_ranks(world, rank)
    check(ranks, alone(net(0, "float64", "float32"), "sgd"), 1e-5)
    assert {values.dtype.name for values in ranks[0][1].values()} == {"float32", "float64"}


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("name", strategies(2))
def test_fetching_ahead_changes_no_bit(name: str, ahead: int) -> None:
    def rank(g: Group, ahead: int) -> Result:
        return spread(wrap(layers(), g, "each", ahead=ahead, **chosen(name)), g, "adam", steps=4)

    plain = run_ranks(2, partial(rank, ahead=0))
    same_bits([state for _, state in [*plain, *run_ranks(2, partial(rank, ahead=ahead))]])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("inner", ["full", "grad", "none"])
@pytest.mark.parametrize("outer", ["full", "grad", "none"])
def test_units_of_different_strategies(world: int, inner: str, outer: str) -> None:
    def rank(g: Group) -> Result:
        first, middle, last = layers()
        model = nn.Sequential(FSDP(first, g, **chosen(inner)), middle, FSDP(last, g, **chosen("full")))
        return spread(FSDP(model, g, **chosen(outer)), g, "sgd", steps=5)

    check(run_ranks(world, rank), alone(net(), "sgd", steps=5), 1e-12)


class Wrapping:
    """A module around another one, without parameters of its own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self.inner.named_parameters()

    def forward(self, x: Array) -> Array:
        return self.inner.forward(x)  # type: ignore[no-any-return]

    def backward(self, dy: Array) -> Array:
        return self.inner.backward(dy)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("world", "name"), [case for case in CASES if case[0] in (1, 2)])
def test_units_in_units_in_units(world: int, name: str) -> None:
    """Layer 1 is in a unit of a unit that has layer 0 itself."""

    def rank(g: Group) -> Result:
        first, middle, last = layers()
        settings = chosen(name)
        block = FSDP(nn.Sequential(first, FSDP(middle, g, **settings)), g, **settings)
        fsdp = FSDP(nn.Sequential(block, last), g, **settings)
        return spread(fsdp, g, "sgd", steps=5)

    first, middle, last = layers()
    check(run_ranks(world, rank), alone(nn.Sequential(nn.Sequential(first, middle), last), "sgd", steps=5), 1e-12)


@pytest.mark.parametrize("name", ["full", "grad", "none"])
@pytest.mark.parametrize("world", [1, 2])
def test_unit_that_has_all_its_parameters_in_units_inside(world: int, name: str) -> None:
    def rank(g: Group) -> Result:
        first, middle, last = layers()
        settings = chosen(name)
        block = FSDP(Wrapping(FSDP(middle, g, **settings)), g, **settings)
        return spread(FSDP(nn.Sequential(first, block, last), g, **settings), g, "sgd", steps=5)

    check(run_ranks(world, rank), alone(net(), "sgd", steps=5), 1e-12)


@pytest.mark.parametrize("name", ["full", "grad", "none"])
@pytest.mark.parametrize("world", [1, 2])
def test_unit_without_parameters(world: int, name: str) -> None:
    """As where every part of a Sequential is wrapped, activations too."""

    def rank(g: Group) -> Result:
        first, middle, last = layers()
        settings = chosen(name)
        block = nn.Sequential(first, FSDP(nn.ReLU(), g, **settings))
        return spread(FSDP(nn.Sequential(block, middle, last), g, **settings), g, "sgd", steps=5)

    first, middle, last = layers()
    module = nn.Sequential(nn.Sequential(first, nn.ReLU()), middle, last)
    check(run_ranks(world, rank), alone(module, "sgd", steps=5), 1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_nodes_are_hosts_by_default(world: int) -> None:
    """All ranks of these groups are in one process: one node, as FULL_SHARD."""

    def rank(g: Group) -> Result:
        return spread(wrap(layers(), g, "each", strategy=ShardingStrategy.HYBRID_SHARD), g, "sgd", steps=5)

    check(run_ranks(world, rank), alone(net(), "sgd", steps=5), 1e-12)
