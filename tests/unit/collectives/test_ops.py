"""Which op exists for which dtype, and the choice among schedules."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paceline.collectives.choose import STAR_MAX_BYTES, STAR_MAX_TRAFFIC, choose_all_reduce
from paceline.collectives.ops import reduction
from paceline.errors import UnsupportedOp

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "mean"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", BF16])
def test_floats_have_arithmetic_and_order(op: str, dtype: Any) -> None:
    assert reduction(op, np.dtype(dtype)).mean == (op == "mean")


@pytest.mark.parametrize(
    ("op", "dtype", "why"),
    [
        ("mean", "i4", "whole numbers"),
        ("mean", "?", "whole numbers"),
        ("min", "c8", "no order"),
        ("max", "c16", "no order"),
        ("band", "f4", "bits"),
        ("bxor", BF16, "bits"),
        ("bor", "c8", "no order|bits"),
        ("median", "f4", "unknown op 'median'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(op: str, dtype: Any, why: str) -> None:
    with pytest.raises(UnsupportedOp, match=why):
        reduction(op, np.dtype(dtype))


@pytest.mark.parametrize(
    ("op", "result"), [("sum", True), ("prod", False), ("max", True), ("min", False), ("bxor", True)]
)
def test_bool_stays_bool(op: str, result: Any) -> None:
    out = reduction(op, np.dtype(bool)).ufunc(np.array([True]), np.array([False]))
    assert out.dtype == bool
    assert out[0] == result


def test_the_choice_depends_on_bytes_and_world_alone() -> None:
    assert choose_all_reduce(1024, 2).schedule == "star"
    assert choose_all_reduce(STAR_MAX_BYTES, 8).schedule == "star"
    assert choose_all_reduce(STAR_MAX_TRAFFIC // 999, 1000).schedule == "star"
    assert choose_all_reduce(STAR_MAX_BYTES + 1, 2).schedule == "ring"
    assert choose_all_reduce(STAR_MAX_TRAFFIC // 999 + 1, 1000).schedule == "ring"
    assert "steps" in choose_all_reduce(4, 2).reason
