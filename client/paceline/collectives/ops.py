"""The reductions: which name means which ufunc, for which dtypes.

All of them commute bit for bit (but for which NaN's payload survives), so the order of the two operands is free; the
order of the *ranks* is not, and belongs to the schedule.

bool keeps its dtype: sum and max are "any", prod and min are "all".
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import UnsupportedOp

__all__ = ["Reduction", "reduction"]

_BITS, _ORDERED, _REAL_OR_COMPLEX, _ALL = "biu", "biufV", "fcV", "biufcV"  # kinds of dtype; V is bfloat16

_TABLE: dict[str, tuple[np.ufunc, str]] = {
    "sum": (np.add, _ALL),
    "mean": (np.add, _REAL_OR_COMPLEX),
    "prod": (np.multiply, _ALL),
    "min": (np.minimum, _ORDERED),
    "max": (np.maximum, _ORDERED),
    "band": (np.bitwise_and, _BITS),
    "bor": (np.bitwise_or, _BITS),
    "bxor": (np.bitwise_xor, _BITS),
}


class Reduction(NamedTuple):
    """How two arrays become one.

    Attributes:
        name: "sum", "mean", ...
        ufunc: applied to two operands of the same dtype, with a result of that dtype.
        mean: the owner divides the total by W, once.
    """

    name: str
    ufunc: np.ufunc
    mean: bool


@lru_cache(maxsize=256)
def reduction(op: str, dtype: np.dtype[Any]) -> Reduction:
    """Looks up a reduction.

    Raises:
        UnsupportedOp: no such name, or the dtype does not have it.
    """
    if op not in _TABLE:
        raise UnsupportedOp(f"unknown op {op!r}; there are {', '.join(_TABLE)}")
    ufunc, kinds = _TABLE[op]
    if dtype.kind not in kinds:
        raise UnsupportedOp(f"op {op!r} is not defined for dtype {dtype}{_advice(op, dtype)}")
    return Reduction(op, ufunc, op == "mean")


def _advice(op: str, dtype: np.dtype[Any]) -> str:
    if op == "mean":
        return ": the mean of whole numbers is not one; sum them, or convert to a float first"
    return ": complex numbers have no order" if dtype.kind == "c" else ": only bool and integers have bits to combine"
