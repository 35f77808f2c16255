"""Whatever is spread over however many ranks, they train the model that one process trains, and agree to the bit."""

from __future__ import annotations

from functools import partial

import pytest
from unit.parallel.sharding.models import (
    Case,
    Result,
    alone,
    cases,
    check,
    check_training,
    chosen,
    each_strategy,
    layers,
    net,
    same_bits,
    spread,
    wrap,
)

from paceline import nn
from paceline._group import Group
from paceline._parallel import FSDP
from paceline.testing import run_ranks
from support.turns import by_turns

SINGLE, MIXED = ("float32", "float32"), ("float64", "float32")
SOME, EACH = "some layers in units", "each layer in a unit"
LONG = [
    Case(*case, steps=20)
    for case in by_turns(cases(1, 2, 3, 4, 8), [(SOME, "sgd"), (SOME, "adam"), ("one unit", "adam")])
]
QUICK = [
    *(case for case in LONG if case.world < 8),
    *(
        Case(*case, model, "sgd")
        for model in ("units in units in units", "a frozen layer", "tied parameters", "units by turns")
        for case in cases(1, 2)
    ),
    *(Case(*case, "units by turns", "sgd") for case in cases(4)),
    *(
        Case(world, name, model, "sgd")
        for world in (1, 2)
        for name in ("full", "grad", "none")
        for model in ("a unit whose parameters are in units", "a unit without parameters")
    ),
    *(Case(world, "hosts", EACH, "sgd") for world in (2, 3)),
]
SLOW = [
    *(case for case in LONG if case.world == 8),
    *(Case(*case, SINGLE, 20, 1e-5) for case in by_turns(cases(1, 3, 4), [(EACH, "sgd"), (EACH, "adam")])),
    *(Case(*case, SOME, "sgd", MIXED, 20, 1e-5) for case in cases(1, 2, 4)),
]


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: f"{case.world}-{case.name}-{case.model}-{case.kind}-{case.dtype[1]}",
)
def test_training_matches_that_of_one_process(case: Case) -> None:
    check_training(case)


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@each_strategy
def test_fetching_ahead_gives_the_same_bits(name: str, ahead: int) -> None:
    def rank(g: Group, ahead: int) -> Result:
        return spread(wrap(layers(), g, "each", ahead=ahead, **chosen(name)), g, "adam", steps=4)

    plain = run_ranks(2, partial(rank, ahead=0))
    same_bits([found.weights for found in [*plain, *run_ranks(2, partial(rank, ahead=ahead))]])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("inner", ["full", "grad", "none"])
@pytest.mark.parametrize("outer", ["full", "grad", "none"])
def test_units_of_different_strategies_train_as_one_process(world: int, inner: str, outer: str) -> None:
    def rank(g: Group) -> Result:
        first, middle, last = layers()
        model = nn.Sequential(FSDP(first, g, **chosen(inner)), middle, FSDP(last, g, **chosen("full")))
        return spread(FSDP(model, g, **chosen(outer)), g, "sgd")

    check(run_ranks(world, rank), alone(net(), "sgd"))
