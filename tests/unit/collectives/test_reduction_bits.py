"""The bits of reductions: the same on all ranks, in the order of the ranks, and means as near as a float can be."""

from fractions import Fraction
from functools import reduce
from math import ldexp
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._collectives.rows import SumRule
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline.testing import run_groups
from support.collective_calls import (
    BF16,
    COMPLEX,
    INTEGERS,
    REALS,
    REDUCING,
    UFUNCS,
    bits,
    exact_values,
    groups_by,
    ops_of,
    quick,
    random_values,
)


@pytest.mark.parametrize("schedule", SCHEDULES["all_reduce"])
@quick(max_examples=30)
@given(data=st.data(), world=st.integers(1, 8), dtype=st.sampled_from(REALS + COMPLEX))
def test_all_ranks_hold_the_same_bits(schedule: str, data: Any, world: int, dtype: Any) -> None:
    op = data.draw(st.sampled_from(ops_of(dtype)))
    order = data.draw(st.sampled_from(["fastest", "fastest", "rank"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    xs = [random_values(rng, 53, dtype) for _ in range(world)]
    results = run_groups(
        groups_by(world, "all_reduce", schedule, data.draw(st.sampled_from([64, 1 << 20]))),
        lambda group: bits(group.all_reduce(xs[group.rank], op=op, order=order)),
        timeout=20,
    )
    assert len(set(results)) == 1


@pytest.mark.parametrize("schedule", SCHEDULES["all_reduce"])
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", REALS)
def test_min_and_max_of_signed_zeros_are_the_same_on_all_ranks(schedule: str, op: str, dtype: Any) -> None:
    """The CPU's min(0.0, -0.0) is whichever comes second."""
    groups = groups_by(5, "all_reduce", schedule)
    results = run_groups(
        groups, lambda group: bits(group.all_reduce(np.full(40, (-1) ** group.rank * 0.0, dtype), op=op))
    )
    assert len(set(results)) == 1


@pytest.mark.parametrize(("collective", "schedule"), REDUCING)
@quick(max_examples=25)
@given(data=st.data(), world=st.integers(1, 8), dtype=st.sampled_from(REALS + INTEGERS))
def test_order_rank_reduces_in_rank_order(collective: str, schedule: str, data: Any, world: int, dtype: Any) -> None:
    op = data.draw(st.sampled_from([op for op in ("sum", "prod", "mean") if op in ops_of(dtype)]))
    n = world * data.draw(st.sampled_from([0, 1, 3, 17]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    xs = [exact_values(rng, n, dtype) if dtype.kind in "iu" else random_values(rng, n, dtype) for _ in range(world)]
    wide = [x.astype("f4") if dtype.itemsize == 2 and dtype.kind in "fV" else x for x in xs]
    with np.errstate(all="ignore"):
        total = reduce(UFUNCS[op], wide)
        total = (total / total.dtype.type(world) if op == "mean" else total).astype(dtype)
    parts = {"all_reduce": [total] * world, "reduce": [total, *[None] * (world - 1)]}
    expected = parts.get(collective) or np.split(total, world)

    def rank(group: Group) -> None:
        result = getattr(group, collective)(xs[group.rank], op=op, order="rank")
        assert (result is None) == (expected[group.rank] is None)
        assert result is None or bits(result) == bits(expected[group.rank])

    groups = groups_by(world, collective, schedule, data.draw(st.sampled_from([16, 64, 1 << 20])))
    run_groups(groups, rank, timeout=20)


def limits(dtype: Any) -> Any:
    return ml_dtypes.finfo(np.zeros(0, dtype).real.dtype)


def ulp(exact: Fraction, dtype: Any) -> Fraction:
    """The distance of neighbours at a number."""
    info = limits(dtype)
    exponent = int(info.minexp)
    if exact:
        above = exact.numerator.bit_length() - exact.denominator.bit_length()  # the power of two, or one more
        exponent = max(exponent, above - (abs(exact) < Fraction(2) ** above))
    return Fraction(2) ** (exponent - info.nmant)


@pytest.mark.parametrize(("collective", "schedule"), REDUCING)
@quick(max_examples=40)
@given(data=st.data(), world=st.integers(1, 8), dtype=st.sampled_from(REALS + COMPLEX))
@pytest.mark.slow
@pytest.mark.sampled(3)
def test_a_mean_is_within_an_ulp(collective: str, schedule: str, data: Any, world: int, dtype: Any) -> None:
    """Of the exact mean, where the scaled sum is exact; elsewhere within the rounding errors of a sum of W terms."""
    info = limits(dtype)
    top = int(info.maxexp) - 8
    shift = data.draw(st.sampled_from([int(info.minexp) - info.nmant, -2, 3, top]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    n = world * 5
    parts = [[(int(k)) for k in rng.integers(-255, 256, n)] for _ in range(world)]
    reals = [np.array([ldexp(k, shift) for k in part], "f8") for part in parts]
    xs = [(x + 1j * x[::-1] if dtype.kind == "c" else x).astype(dtype) for x in reals]
    for x, real in zip(xs, reals, strict=True):
        assert (x.real.astype("f8") == real).all(), "the values are numbers of the dtype"

    results = run_groups(
        groups_by(world, collective, schedule, 64),
        lambda group: getattr(group, collective)(xs[group.rank], op="mean"),
        timeout=20,
    )
    means = np.concatenate(results) if collective == "reduce_scatter" else results[0]
    in_order = SCHEDULES[collective][schedule].sums is SumRule.IN_RANK_ORDER
    for i, found in enumerate(means):
        exact = sum(Fraction(part[i]) for part in parts) * Fraction(2) ** shift / world
        bound = ulp(exact, dtype)
        if dtype == BF16 and not in_order:  # 8 bits hold no sum of several
            size = sum(Fraction(abs(part[i])) for part in parts) * Fraction(2) ** shift / world
            bound += world * size * Fraction(float(info.eps))
        if shift < info.minexp:  # each rank's value is scaled first
            bound += world * Fraction(float(info.smallest_subnormal))
        assert np.isfinite(found)
        assert abs(Fraction(float(found.real)) - exact) <= bound


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "schedule"), REDUCING)
@quick(max_examples=30)
@given(data=st.data(), world=st.integers(1, 8), dtype=st.sampled_from(REALS + COMPLEX))
def test_a_mean_of_finite_values_is_finite(collective: str, schedule: str, data: Any, world: int, dtype: Any) -> None:
    largest = float(limits(dtype).max)
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    below = data.draw(st.sampled_from([0.0, 1e-9, 1e-7, 1e-3, 0.5]))
    signs = [data.draw(st.sampled_from([1, -1])) for _ in range(world)]

    def values(rank: int) -> Any:
        real = (largest * (1 - below * rng.random(world * 8))).astype("f8")
        if dtype.kind == "c":
            return (signs[rank] * real).astype(real.dtype).astype(np.zeros(0, dtype).real.dtype).astype(dtype)
        with np.errstate(over="ignore"):
            return np.clip((signs[rank] * real).astype(dtype), limits(dtype).min, limits(dtype).max)

    xs = [values(rank) for rank in range(world)]
    assert all(np.isfinite(x).all() for x in xs)
    results = run_groups(
        groups_by(world, collective, schedule),
        lambda group: getattr(group, collective)(xs[group.rank], op="mean"),
        timeout=20,
    )
    assert all(np.isfinite(result).all() for result in results if result is not None)
