"""The arithmetic of a reduction, on segments. No links, no frames.

Shapes: n elements of a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from paceline.arrays import Array
from paceline.collectives.ops import Reduction

__all__ = ["Arithmetic", "arithmetic"]


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
