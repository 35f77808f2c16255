"""Which op exists for which dtype, and how a mean keeps from overflowing."""

from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest

from paceline._collectives import arithmetic
from paceline._collectives.arithmetic import reduction
from paceline._collectives.tasks import ORDERS
from paceline._group.call_options import Op, Order
from paceline.errors import UnsupportedOp

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "mean"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", BF16])
def test_floats_support_arithmetic_and_ordering_ops(op: str, dtype: Any) -> None:
    found = reduction(op, np.dtype(dtype))
    assert (found.divisor(3) != 1.0) == (op == "mean")


def test_mean_scales_by_a_power_of_two_and_divides_by_the_rest() -> None:
    mean = reduction("mean", np.dtype("f4"))
    for world in range(1, 70):
        scale = mean.scale(world)
        power = 1.0 if scale is None else float(scale)
        assert power * world <= 1.0 or world == 1, "a sum of W values of 1 does not exceed 1"
        assert mean.divisor(world) / power == world
        assert np.log2(power) == round(np.log2(power))
    assert reduction("mean", np.dtype("c8")).scale(4).dtype == np.float32
    assert reduction("mean", np.dtype("f2")).scale(4) is None, "float16 is added up in float32 instead"


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
def test_an_op_undefined_for_a_dtype_is_refused_with_a_reason(op: str, dtype: Any, why: str) -> None:
    with pytest.raises(UnsupportedOp, match=why):
        reduction(op, np.dtype(dtype))


def test_signatures_and_the_error_of_an_unknown_op_list_all_ops() -> None:
    known = {*arithmetic._TABLE, *arithmetic._ALSO}
    assert set(get_args(Op)) == known
    assert set(get_args(Order)) == set(ORDERS)
    with pytest.raises(UnsupportedOp) as caught:
        reduction("summ", np.dtype("f4"))
    assert set(str(caught.value).partition("the known ones are ")[2].split(", ")) == known


def test_avg_is_an_alias_of_mean() -> None:
    for dtype in ("f2", "f4", BF16, "c8"):
        assert reduction("avg", np.dtype(dtype)) == reduction("mean", np.dtype(dtype))
    with pytest.raises(UnsupportedOp, match="op 'mean' is not defined for dtype int32: the mean of whole numbers"):
        reduction("avg", np.dtype("i4"))


@pytest.mark.parametrize(
    ("op", "result"), [("sum", True), ("prod", False), ("max", True), ("min", False), ("bxor", True)]
)
def test_reducing_bools_gives_a_bool(op: str, result: Any) -> None:
    out = reduction(op, np.dtype(bool)).ufunc(np.array([True]), np.array([False]))
    assert out.dtype == bool
    assert out[0] == result
