"""Reductions: a table from names to ufuncs and dtypes, and the arithmetic on segments. No links, no frames.

All reductions commute bit for bit, except for which NaN survives and which of two zeros `min` and `max` choose. The
schedule decides the order of the *ranks*. bool keeps its dtype: sum and max are "any", prod and min are "all".

Shapes: a segment has n elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from paceline._base.arrays import Array
from paceline._base.sum_order import Node
from paceline._collectives.rows import SumRule
from paceline._microbatch.sum_tree import merges
from paceline.errors import UnsupportedOp

_PIECE = 1 << 15
"""Elements that are summed in a tree at a time: its partial sums stay in the processor's caches."""

_BITS, _ORDERED, _REAL_OR_COMPLEX, _ALL = "biu", "biufV", "fcV", "biufcV"  # dtype kinds; V is bfloat16

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


_ALSO = {"avg": "mean"}
"""Other names of ops: torch's."""


def name_of_op(op: object) -> str:
    """Returns the one name of an op: "mean" for "avg". Anything unknown keeps its name, and `reduction` refuses it."""
    name = str(op) if isinstance(op, str) else repr(op)
    return _ALSO.get(name, name)


class Reduction(NamedTuple):
    """A way to combine several arrays into one.

    `ufunc` combines two operands of `dtype`, which ranks always send. One rank adds up several operands in `wide`, if
    that differs: float16 and bfloat16 have too few digits. `sums` is the weakest order in which a schedule may combine
    the values of an element.
    """

    name: str
    ufunc: np.ufunc
    dtype: np.dtype[Any]
    wide: np.dtype[Any] | None = None
    sums: SumRule = SumRule.ALIKE

    def scale(self, world: int) -> np.generic | None:
        """Returns the factor by which each rank first multiplies its values: for a mean, a power of two up to 1/W.

        With it the sum overflows only where the mean does. Because it is a power of two, only values that fall below
        the smallest normal number are rounded. float16 values would often fall there, but they are added up in `wide`.
        None if values are not scaled.
        """
        if self.name != "mean" or world == 1 or self.dtype == np.float16:
            return None
        scale: np.generic = np.zeros(0, self.dtype).real.dtype.type(2.0 ** -_exponent(world))
        return scale

    def divisor(self, world: int) -> float:
        """Returns the number by which the total is divided, once."""
        if self.name != "mean":
            return 1.0
        return float(world) if self.scale(world) is None else world / 2 ** _exponent(world)


def _exponent(world: int) -> int:
    """Returns the exponent of the least power of two that is not below the world size."""
    return (world - 1).bit_length()


def reduction(op: object, dtype: np.dtype[Any]) -> Reduction:
    """Looks up a reduction; raises UnsupportedOp if there is no such op, or it is not defined for the dtype."""
    return _reduction(name_of_op(op), dtype)


@lru_cache(maxsize=256)
def _reduction(op: str, dtype: np.dtype[Any]) -> Reduction:
    if op not in _TABLE:
        raise UnsupportedOp(f"unknown op {op!r}; the known ones are {', '.join([*_TABLE, *_ALSO])}")
    ufunc, kinds = _TABLE[op]
    if dtype.kind not in kinds:
        raise UnsupportedOp(f"op {op!r} is not defined for dtype {dtype}{_advice(op, dtype)}")
    half = dtype == np.float16 or dtype.kind == "V"
    wide = np.dtype(np.float32) if half and ufunc in (np.add, np.multiply) else None
    sums = SumRule.ALIKE
    if op == "mean" and dtype == np.float16:  # needs `wide`
        sums = SumRule.IN_RANK_ORDER
    elif (op == "prod" and dtype.kind == "c") or (op in ("min", "max") and dtype.kind in "fV"):
        # CPUs differ in how they round a product of complex numbers, and in the result of min(0.0, -0.0).
        sums = SumRule.ONCE
    return Reduction(op, ufunc, dtype, wide, sums)


def _advice(op: str, dtype: np.dtype[Any]) -> str:
    if op == "mean":
        return ": the mean of whole numbers may be a fraction; sum them, or convert them to floats first"
    return ": complex numbers have no order" if dtype.kind == "c" else ": only bool and integers have bits to combine"


def _apply(ufunc: Callable[..., Any], *args: Any, out: Array) -> None:
    """Calls a ufunc without NumPy's warnings: infinities are valid values here, and a warning on one rank is no use."""
    with np.errstate(all="ignore"):
        ufunc(*args, out=out)


class Arithmetic:
    """The arithmetic of a reduction over a world, from the ranks' arguments to the result.

    The total of a sum is divided by `divisor`; None for the reduction's own.
    """

    def __init__(self, reduction: Reduction, world: int, divisor: float | None = None) -> None:
        self._ufunc = reduction.ufunc
        self._wide = reduction.wide
        self._divisor = reduction.divisor(world) if divisor is None else divisor
        self._half = reduction.dtype.itemsize == 2
        self.scale = reduction.scale(world)

    def scaled(self, own: Array) -> Array:
        """Returns a rank's own values as they enter the reduction; a new array if scaling changes them."""
        if self.scale is None:
            return own
        scaled = np.empty_like(own)
        _apply(np.multiply, _real(own), self.scale, out=_real(scaled))
        return scaled

    def terms_of(self, rank: int) -> int:
        """Returns how many arrays a rank contributes."""
        del rank
        return 1

    def combine(self, left: Array, right: Array, target: Array) -> None:
        """Combines two operands into the target, which may be one of them."""
        _apply(self._ufunc, left, right, out=target)

    def finish(self, target: Array) -> None:
        """Divides the complete total, if the reduction has a divisor."""
        if self._divisor == 1.0:
            return
        if self._half:
            with np.errstate(all="ignore"):
                target[...] = target.astype(np.float32) / np.float32(self._divisor)
        else:
            real = _real(target)
            _apply(np.true_divide, real, real.dtype.type(self._divisor), out=real)

    def fold(self, terms: Mapping[int, Array], target: Array) -> None:
        """Adds up the terms of all ranks in rank order and finishes; writes to the target, which may be a term.

        If there is a wide dtype, it adds up in that one and rounds once.
        """
        first, second, *rest = map(terms.__getitem__, sorted(terms))
        if self._wide is not None:
            self._fold_wide(self._wide, [first, second, *rest], target)
            return
        if rest:  # a later term must not be overwritten before it is added
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


class TreeArithmetic(Arithmetic):
    """Sums in the fixed tree over the microbatches of a step (`sum_tree`), of which the ranks have nodes.

    `nodes` has for each rank the nodes whose sums it has, from left to right. Together they are the whole tree, which
    has V `leaves`.
    """

    def __init__(
        self, reduction: Reduction, nodes: tuple[tuple[Node, ...], ...], leaves: int, divisor: float | None = None
    ) -> None:
        super().__init__(reduction, len(nodes), divisor)
        self._counts = [len(of_rank) for of_rank in nodes]
        from_the_left = sorted((node, rank, i) for rank, of_rank in enumerate(nodes) for i, node in enumerate(of_rank))
        self._places = [(rank, i) for _, rank, i in from_the_left]
        self._merges = merges(tuple(node for node, _, _ in from_the_left), leaves)

    def terms_of(self, rank: int) -> int:
        """See `Arithmetic`: a rank contributes its nodes; one without any sends an array that counts for nothing."""
        return max(1, self._counts[rank])

    def fold(self, terms: Mapping[int, Array], target: Array) -> None:
        """Does as `Arithmetic.fold`, but in the tree; a rank's term has its nodes one after the other."""
        n = target.size
        rows = [terms[rank][i * n : (i + 1) * n] for rank, i in self._places]
        for lo in range(0, n, _PIECE):
            piece = slice(lo, lo + _PIECE)
            self._sum([row[piece] for row in rows], target[piece])
        if self._wide is None:
            self.finish(target)

    def _sum(self, rows: list[Array], target: Array) -> None:
        """Sums up a few elements; the target is written by the last addition, when nothing else is read any more."""
        waiting: list[tuple[Array, bool]] = []  # with whether the array is scratch memory
        left_to_do = len(rows) - 1
        for row, count in zip(rows, self._merges, strict=True):
            waiting.append((row if self._wide is None else row.astype(self._wide), self._wide is not None))
            for _ in range(count):
                (right, right_is_free), (left, left_is_free) = waiting.pop(), waiting.pop()
                left_to_do -= 1
                if not left_to_do and self._wide is None:
                    into = target
                elif left_is_free or right_is_free:
                    into = left if left_is_free else right
                else:
                    into = np.empty_like(left)
                self.combine(left, right, into)
                waiting.append((into, True))
        ((total, _),) = waiting
        if len(rows) == 1 and self._wide is None:  # one rank has the sum of all leaves
            target[...] = total
        if self._wide is not None:
            with np.errstate(all="ignore"):
                target[...] = total if self._divisor == 1.0 else total / self._wide.type(self._divisor)


@lru_cache(maxsize=64)
def tree_arithmetic(
    reduction: Reduction, nodes: tuple[tuple[Node, ...], ...], leaves: int, divisor: float | None = None
) -> TreeArithmetic:
    """Returns the cached arithmetic of a sum in a tree; arguments as for `TreeArithmetic`."""
    return TreeArithmetic(reduction, nodes, leaves, divisor)


@lru_cache(maxsize=64)
def arithmetic(reduction: Reduction, world: int, divisor: float | None = None) -> Arithmetic:
    """Returns the cached arithmetic of a reduction; arguments as for `Arithmetic`."""
    return Arithmetic(reduction, world, divisor)


def _real(x: Array) -> Array:
    """Views complex numbers as pairs of real ones: a complex infinity times a complex number would be NaN."""
    return x.view(x.real.dtype) if x.dtype.kind == "c" else x
