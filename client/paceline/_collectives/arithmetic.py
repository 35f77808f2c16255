"""The reductions: which name means which ufunc, for which dtypes; and the arithmetic on segments. No links, no frames.

All of them commute, bit for bit but for which NaN survives and which zero `min` and `max` choose of two; the order of
the *ranks* belongs to the schedule. bool keeps its dtype: sum and max are "any", prod and min are "all".

Shapes: n elements of a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from paceline._arrays import Array
from paceline._collectives.rows import SumOrder
from paceline.errors import UnsupportedOp

__all__ = ["Arithmetic", "Reduction", "arithmetic", "reduction"]

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
    sums: SumOrder = SumOrder.ALIKE

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
    sums = SumOrder.ALIKE
    if op == "mean" and dtype == np.float16:  # needs `wide`
        sums = SumOrder.IN_RANK_ORDER
    elif (op == "prod" and dtype.kind == "c") or (op in ("min", "max") and dtype.kind in "fV"):
        sums = (
            SumOrder.ONCE
        )  # not all CPUs round a product of complex numbers alike; min(0.0, -0.0) is whichever they like
    return Reduction(op, ufunc, dtype, wide, sums)


def _advice(op: str, dtype: np.dtype[Any]) -> str:
    if op == "mean":
        return ": the mean of whole numbers is not one; sum them, or convert to a float first"
    return ": complex numbers have no order" if dtype.kind == "c" else ": only bool and integers have bits to combine"


def _apply(ufunc: Callable[..., Any], *args: Any, out: Array) -> None:
    """Calls a ufunc without NumPy's warnings: infinities are values here, and a warning on one rank helps nobody."""
    with np.errstate(all="ignore"):
        ufunc(*args, out=out)


class Arithmetic:
    """A reduction over a world: what happens to values on their way from the ranks' arguments to the result.

    Args:
        reduction: the reduction.
        world: number of ranks.
        divisor: what the total of a sum is divided by; None for what the reduction itself does.
    """

    def __init__(self, reduction: Reduction, world: int, divisor: float | None = None) -> None:
        self._ufunc = reduction.ufunc
        self._wide = reduction.wide
        self._divisor = reduction.divisor(world) if divisor is None else divisor
        self._half = reduction.dtype.itemsize == 2
        self.scale = reduction.scale(world)

    def scaled(self, own: Array) -> Array:
        """A rank's own values as they enter the reduction; a new array if they change."""
        if self.scale is None:
            return own
        scaled = np.empty_like(own)
        _apply(np.multiply, _real(own), self.scale, out=_real(scaled))
        return scaled

    def combine(self, left: Array, right: Array, target: Array) -> None:
        """Two operands into the target, which may be one of them."""
        _apply(self._ufunc, left, right, out=target)

    def finish(self, target: Array) -> None:
        """The total is complete: divides it, if it is to be divided."""
        if self._divisor == 1.0:
            return
        if self._half:
            with np.errstate(all="ignore"):
                target[...] = target.astype(np.float32) / np.float32(self._divisor)
        else:
            real = _real(target)
            _apply(np.true_divide, real, real.dtype.type(self._divisor), out=real)

    def fold(self, terms: Mapping[int, Array], target: Array) -> None:
        """The terms of all ranks, added up in rank order and finished, into the target, which may be a term.

        In the wide dtype, if there is one, and rounded once.
        """
        first, second, *rest = map(terms.__getitem__, sorted(terms))
        if self._wide is not None:
            self._fold_wide(self._wide, [first, second, *rest], target)
            return
        if rest:  # what stands further behind must not be overwritten before its turn
            rest = [term.copy() if np.may_share_memory(term, target) else term for term in rest]
        self.combine(first, second, target)
        for term in rest:
            self.combine(target, term, target)
        self.finish(target)

    def _fold_wide(self, wide: np.dtype[Any], terms: list[Array], target: Array) -> None:
        with np.errstate(all="ignore"):
            total = self._ufunc(terms[0].astype(wide), terms[1].astype(wide))
            for term in terms[2:]:
                self._ufunc(total, term, out=total)
            target[...] = total if self._divisor == 1.0 else total / wide.type(self._divisor)


@lru_cache(maxsize=64)
def arithmetic(reduction: Reduction, world: int, divisor: float | None = None) -> Arithmetic:
    """The arithmetic of a reduction, made once; arguments as for `Arithmetic`."""
    return Arithmetic(reduction, world, divisor)


def _real(x: Array) -> Array:
    """Complex numbers as pairs of real ones: to scale a complex infinity by a complex number gives no number."""
    return x.view(x.real.dtype) if x.dtype.kind == "c" else x
