"""A bucket that sends only a few directions of each matrix (`PowerSGD`), in two reductions.

For a matrix M, shape [n, m], the first reduction sums P = M Q, shape [n, r], over the ranks, where Q comes from the
step before. All ranks make the columns of the sum orthonormal. The second reduction sums Q = M^T P, shape [m, r]. Then
P Q^T is the sum of all M, projected on the columns of P.

All ranks must end with the same bits (I5), whatever their processors. So values derived from sums are computed element
by element, and matrix products are used only for values of this rank alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._parallel._buckets import Bucket, Empty
from paceline._parallel._parameter import Parameter


def shrinks(parameter: Parameter, rank: int) -> bool:
    """Returns True if `rank` directions take fewer numbers than the gradient."""
    n, m = _sides(parameter)
    return rank * (n + m) < n * m


def _sides(parameter: Parameter) -> tuple[int, int]:
    shape = parameter.shape
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


class LowRankLayout:
    """Where the gradients, the first array that is sent (P) and the second one (Q) have their parts, by parameter.

    A gradient that does not shrink lies whole in the first array, and has no part of the second. The arrays may be
    tensors.

    Attributes:
        first: number of elements of the first array.
        second: number of elements of the second array.
    """

    def __init__(self, parameters: Iterable[Parameter], rank: int) -> None:
        parameters = tuple(parameters)
        self.rank = rank
        self.sides = [_sides(p) for p in parameters]
        self._shrinks = [shrinks(p, rank) for p in parameters]
        each = list(zip(self.sides, self._shrinks, strict=True))
        self._in_homes = _slices(n * m for n, m in self.sides)
        self._in_first = _slices(rank * n if small else n * m for (n, m), small in each)
        self._in_second = _slices(rank * m if small else 0 for (_, m), small in each)
        self.first, self.second = self._in_first[-1].stop, self._in_second[-1].stop

    def home(self, gradients: Any, number: int) -> Any:
        """Returns a gradient as a matrix, shape [n, m]."""
        return gradients[self._in_homes[number]].reshape(self.sides[number])

    def matrices(self, gradients: Any, first: Any, second: Any) -> dict[int, tuple[Any, Any, Any]]:
        """Returns views by number of the parameter: the gradient, P and Q, for those that shrink."""
        return {
            number: (
                self.home(gradients, number),
                first[self._in_first[number]].reshape(-1, self.rank),
                second[self._in_second[number]].reshape(-1, self.rank),
            )
            for number, small in enumerate(self._shrinks)
            if small
        }

    def whole(self) -> Iterator[tuple[slice, slice]]:
        """Yields the places, in the gradients and in the first array, of those that travel whole."""
        for place, part, small in zip(self._in_homes, self._in_first, self._shrinks, strict=True):
            if not small:
                yield place, part

    def first_directions(self) -> NDArray[np.float64]:
        """Returns the directions that all ranks begin with, shape [second]."""
        found = np.empty(self.second)
        for number, part in enumerate(self._in_second):  # of NumPy's generators only raw bits never change
            raw = np.random.PCG64(number).random_raw(part.stop - part.start)
            found[part] = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5
        return found

    def orthonormalise(self, first: NDArray[Any]) -> None:
        """Makes the columns of each P of the first array orthonormal, in place."""
        for part, small in zip(self._in_first, self._shrinks, strict=True):
            if small:
                _orthonormalise(first[part].reshape(-1, self.rank))


def _slices(sizes: Iterable[int]) -> list[slice]:
    return [slice(*pair) for pair in pairwise(accumulate(sizes, initial=0))]


class LowRankBucket(Bucket):
    """A `Bucket` that sends `rank` directions of each matrix; gradients live in a separate array.

    At least one of the parameters `shrinks`. `compresses` is False if this rank was alone at the last `pack`: nothing
    travels, so nothing is left out.
    """

    def __init__(self, parameters: Mapping[str, Parameter], rank: int, room: int, empty: Empty, feedback: bool) -> None:
        self._layout = LowRankLayout(parameters.values(), rank)
        super().__init__(parameters, room, empty, feedback, weight_at=self._layout.first, apart=True)
        self.compresses = True
        self._directions = np.empty_like(self._second)
        self.new_generation()

    @property
    def divisible(self) -> bool:
        """False: the first reduction does not sum gradients; see `Bucket`."""
        return False

    def _allocate(self) -> None:
        super()._allocate()
        self._second = self._empty(self._layout.second, self.flat.dtype)
        self._own = np.empty_like(self._second)
        self._values = np.empty(self._count, self.flat.dtype)
        self._left = self._values

    def new_generation(self) -> None:
        """Gives all ranks, newcomers too, the same directions to begin with."""
        self._directions[...] = self._layout.first_directions()

    def second(self) -> NDArray[Any]:
        """Returns, after the first reduction, the array that the second reduction sums in place."""
        self._layout.orthonormalise(self.flat)
        with np.errstate(all="ignore"):  # infinities are allowed here
            for matrix, p, q in self._layout.matrices(self._left, self.flat, self._second).values():
                np.matmul(matrix.T, p, out=q)
        self._own[...] = self._second
        return self._second

    def _encode(self, *, alone: bool) -> None:
        assert self._apart is not None
        self.compresses = not alone
        if not self.compresses:
            return
        self._left = self._values
        if self.memory.feedback:
            kept, self._left = self.memory.residuals(self._count, self.flat.dtype)
            np.add(self._apart, kept, out=self._left)
        else:
            self._left[...] = self._apart
        with np.errstate(all="ignore"):
            for matrix, p, q in self._layout.matrices(self._left, self.flat, self._directions).values():
                np.matmul(matrix, q, out=p)
        for place, part in self._layout.whole():
            self.flat[part] = self._left[place]

    def _decode(self, total: float, *, divided: bool) -> None:
        assert self._apart is not None
        assert not divided
        if not self.compresses:
            if total != 1:
                np.divide(self._apart, total, out=self._apart)
            return
        layout = self._layout
        own = layout.matrices(self._left, self.flat, self._own)
        directions = layout.matrices(self._left, self.flat, self._directions)
        with np.errstate(all="ignore"):
            for number, (matrix, p, q) in layout.matrices(self._left, self.flat, self._second).items():
                if np.isfinite(q).all():  # q is a sum, so all ranks decide alike
                    directions[number][2][...] = q
                matrix -= p @ own[number][2].T
                if not np.isfinite(matrix).all():  # would spoil all later steps
                    matrix[~np.isfinite(matrix)] = 0
                np.divide(q, total, out=q)
                found = np.multiply.outer(p[:, 0], q[:, 0])
                term = np.empty_like(found)
                for k in range(1, layout.rank):
                    np.add(found, np.multiply.outer(p[:, k], q[:, k], out=term), out=found)
                layout.home(self._apart, number)[...] = found
        for place, part in layout.whole():
            self._apart[place] = self.flat[part] / self.flat.dtype.type(total)
            self._left[place] = 0
        self.memory.wrote()


def _orthonormalise(p: NDArray[Any]) -> None:
    """Makes the columns of p, shape [n, r], orthonormal by Gram-Schmidt in place; dependent columns become zeros."""
    with np.errstate(all="ignore"):
        columns = p.T.astype(np.float64)
        for k, column in enumerate(columns):
            before = np.sqrt(np.add.reduce(column * column))
            for other in columns[:k]:
                column -= np.add.reduce(column * other) * other
            norm = np.sqrt(np.add.reduce(column * column))
            column[...] = column / norm if norm > 1e-6 * before and np.isfinite(norm) else 0.0
        p[...] = columns.T
