"""Whatever is spread over however many ranks, they train the model that one process trains, and agree to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

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

SAMPLES, BATCH = 23, 11  # batches of 11, 11 and 1: shares are uneven, and some ranks get no sample
OPTIMIZERS: dict[str, Callable[[HasParameters], Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": partial(Adam, lr=0.01),
}
Result = tuple[list[float], Weights]


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


MODELS: dict[str, Callable[[Callable[[Any], Any], Any, Any, Any], Any]] = {
    "one unit": lambda wrap, *layers: wrap(nn.Sequential(*layers)),
    "some layers in units": lambda wrap, a, b, c: wrap(nn.Sequential(wrap(a), b, wrap(c))),
    "each layer in a unit": lambda wrap, *layers: wrap(nn.Sequential(*map(wrap, layers))),
    "units in units in units": lambda wrap, a, b, c: wrap(nn.Sequential(wrap(nn.Sequential(a, wrap(b))), c)),
    "a unit whose parameters are in units": lambda wrap, a, b, c: wrap(nn.Sequential(a, wrap(Wrapping(wrap(b))), c)),
    "a unit without parameters": lambda wrap, a, b, c: wrap(nn.Sequential(nn.Sequential(a, wrap(nn.ReLU())), b, c)),
}
"""A function that makes a model of three layers, given another that wraps a module in a unit."""


class Case(NamedTuple):
    """Training that is compared with that of one process.

    Attributes:
        world: number of ranks.
        name: of the strategy; "hosts" for nodes that are found.
        model: a key of `MODELS`.
        kind: a key of `OPTIMIZERS`.
        dtype: of weights, and of other parameters.
        steps: number of steps.
        tolerance: of losses and weights.
    """

    world: int
    name: str
    model: str
    kind: str
    dtype: tuple[str, str] = ("float64", "float64")
    steps: int = 5
    tolerance: float = 1e-12


def every(*worlds: int) -> list[tuple[int, str]]:
    return [(world, name) for world in worlds for name in strategies(world)]


SINGLE, MIXED = ("float32", "float32"), ("float64", "float32")
SOME, EACH = "some layers in units", "each layer in a unit"
LONG = [
    Case(*case, steps=20)
    for case in by_turns(every(1, 2, 3, 4, 8), [(SOME, "sgd"), (SOME, "adam"), ("one unit", "adam")])
]
QUICK = [
    *(case for case in LONG if case.world < 8),
    *(Case(*case, "units in units in units", "sgd") for case in every(1, 2)),
    *(
        Case(world, name, model, "sgd")
        for world in (1, 2)
        for name in ("full", "grad", "none")
        for model in list(MODELS)[4:]
    ),
    *(Case(world, "hosts", EACH, "sgd") for world in (2, 3)),
]
SLOW = [
    *(case for case in LONG if case.world == 8),
    *(Case(*case, SINGLE, 20, 1e-5) for case in by_turns(every(1, 3, 4), [(EACH, "sgd"), (EACH, "adam")])),
    *(Case(*case, SOME, "sgd", MIXED, 20, 1e-5) for case in every(1, 2, 4)),
]


def alone(module: Any, kind: str, dtype: str = "float64", steps: int = 5) -> Result:
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


def spread(fsdp: FSDP, group: Group, kind: str, dtype: str = "float64", steps: int = 5) -> Result:
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


def check(ranks: list[Result], expected: Result, tolerance: float = 1e-12) -> None:
    same_bits([state for _, state in ranks])
    for losses, _ in ranks:
        np.testing.assert_allclose(losses, expected[0], rtol=tolerance, atol=tolerance)
    close(ranks[0][1], expected[1], tolerance)
    if len(ranks) == 1:
        assert ranks[0][0] == expected[0]
        same_bits([expected[1], ranks[0][1]])


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: f"{case.world}-{case.name}-{case.model}-{case.kind}-{case.dtype[1]}",
)
def test_training_matches_that_of_one_process(case: Case) -> None:
    """Each rank starts from weights of its own; rank 0's must prevail."""
    hosts = case.name == "hosts"  # all ranks of these groups are in one process: one node, as FULL_SHARD
    settings = {"strategy": ShardingStrategy.HYBRID_SHARD} if hosts else chosen(case.name)

    def rank(g: Group) -> Result:
        fsdp = MODELS[case.model](lambda module: FSDP(module, g, **settings), *layers(g.rank, *case.dtype))
        return spread(fsdp, g, case.kind, case.dtype[0], case.steps)

    ranks = run_ranks(case.world, rank)
    check(
        ranks,
        alone(MODELS[case.model](lambda module: module, *layers(0, *case.dtype)), case.kind, case.dtype[0], case.steps),
        case.tolerance,
    )
    assert {values.dtype.name for values in ranks[0][1].values()} == set(case.dtype)


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("name", strategies(2))
def test_fetching_ahead_gives_the_same_bits(name: str, ahead: int) -> None:
    def rank(g: Group, ahead: int) -> Result:
        return spread(wrap(layers(), g, "each", ahead=ahead, **chosen(name)), g, "adam", steps=4)

    plain = run_ranks(2, partial(rank, ahead=0))
    same_bits([state for _, state in [*plain, *run_ranks(2, partial(rank, ahead=ahead))]])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("inner", ["full", "grad", "none"])
@pytest.mark.parametrize("outer", ["full", "grad", "none"])
def test_units_of_different_strategies_train_as_one_process(world: int, inner: str, outer: str) -> None:
    def rank(g: Group) -> Result:
        first, middle, last = layers()
        model = nn.Sequential(FSDP(first, g, **chosen(inner)), middle, FSDP(last, g, **chosen("full")))
        return spread(FSDP(model, g, **chosen(outer)), g, "sgd")

    check(run_ranks(world, rank), alone(net(), "sgd"))
