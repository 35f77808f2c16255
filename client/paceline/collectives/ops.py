"""The reductions: which name means which ufunc, for which dtypes.

All of them commute, bit for bit but for which NaN survives and which zero `min` and `max` choose of two; the order of
the *ranks* belongs to the schedule.

bool keeps its dtype: sum and max are "any", prod and min are "all".
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from paceline.collectives.rows import Sums
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
    """How arrays become one.

    Attributes:
        name: "sum", "mean", ...
        ufunc: applied to two operands of the same dtype, with a result of that dtype.
        dtype: of the operands.
        wide: dtype in which several are added up at one rank, if that is another one: float16 and bfloat16 have too
            few digits. What travels between ranks is always `dtype`.
        sums: how an element must be combined, at least.
    """

    name: str
    ufunc: np.ufunc
    dtype: np.dtype[Any]
    wide: np.dtype[Any] | None = None
    sums: Sums = Sums.ALIKE

    def scale(self, world: int) -> np.generic | None:
        """By what each rank multiplies its values first, or None: for a mean, a power of two up to 1/W.

        So the sum overflows only where the mean does; and as it is a power of two, nothing is rounded but what falls
        below the smallest normal number. float16 would fall there soon, but it is added up in `wide`.
        """
        if self.name != "mean" or world == 1 or self.dtype == np.float16:
            return None
        scale: np.generic = np.zeros(0, self.dtype).real.dtype.type(2.0 ** -_exponent(world))
        return scale

    def divisor(self, world: int) -> float:
        """By what the total is divided, once."""
        if self.name != "mean":
            return 1.0
        return float(world) if self.scale(world) is None else world / 2 ** _exponent(world)


def _exponent(world: int) -> int:
    """The least power of two that is not below the world size."""
    return (world - 1).bit_length()


def reduction(op: object, dtype: np.dtype[Any]) -> Reduction:
    """Looks up a reduction.

    Raises:
        UnsupportedOp: no such name, or the dtype does not have it.
    """
    return _reduction(op if isinstance(op, str) else repr(op), dtype)


@lru_cache(maxsize=256)
def _reduction(op: str, dtype: np.dtype[Any]) -> Reduction:
    if op not in _TABLE:
        raise UnsupportedOp(f"unknown op {op!r}; there are {', '.join(_TABLE)}")
    ufunc, kinds = _TABLE[op]
    if dtype.kind not in kinds:
        raise UnsupportedOp(f"op {op!r} is not defined for dtype {dtype}{_advice(op, dtype)}")
    half = dtype == np.float16 or dtype.kind == "V"
    wide = np.dtype(np.float32) if half and ufunc in (np.add, np.multiply) else None
    sums = Sums.ALIKE
    if op == "mean" and dtype == np.float16:  # needs `wide`
        sums = Sums.IN_RANK_ORDER
    elif (op == "prod" and dtype.kind == "c") or (op in ("min", "max") and dtype.kind in "fV"):
        sums = Sums.ONCE  # not all CPUs round a product of complex numbers alike; min(0.0, -0.0) is whichever they like
    return Reduction(op, ufunc, dtype, wide, sums)


def _advice(op: str, dtype: np.dtype[Any]) -> str:
    if op == "mean":
        return ": the mean of whole numbers is not one; sum them, or convert to a float first"
    return ": complex numbers have no order" if dtype.kind == "c" else ": only bool and integers have bits to combine"
