"""A bucket that sends only a few directions of each matrix (`PowerSGD`), in two reductions.

For a matrix M, shape [n, m], the first reduction sums P = M Q, shape [n, r], over the ranks, where Q comes from the
step before. All ranks make the columns of the sum orthonormal. The second reduction sums Q = M^T P, shape [m, r]. Then
P Q^T is the sum of all M, projected on the columns of P.

All ranks must end with the same bits (I5), whatever their processors. So values derived from sums are computed element
by element, and matrix products are used only for values of this rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class LowRankBucket(Bucket):
    """A `Bucket` that sends `rank` directions of each matrix; gradients live in a separate array.

    At least one of the parameters `shrinks`. `compresses` is False if this rank was alone at the last `pack`: nothing
    travels, so nothing is left out.
    """

    def __init__(self, parameters: Mapping[str, Parameter], rank: int, room: int, empty: Empty, feedback: bool) -> None:
        self._rank = rank
        self._sides = [_sides(p) for p in parameters.values()]
        self._shrinks = [shrinks(p, rank) for p in parameters.values()]
        sizes = [rank * n if small else n * m for (n, m), small in zip(self._sides, self._shrinks, strict=True)]
        self._in_flat = [slice(*pair) for pair in pairwise(accumulate(sizes, initial=0))]
        sizes = [n * m for n, m in self._sides]
        self._in_homes = [slice(*pair) for pair in pairwise(accumulate(sizes, initial=0))]
        sizes = [rank * m if small else 0 for (_, m), small in zip(self._sides, self._shrinks, strict=True)]
        self._in_second = [slice(*pair) for pair in pairwise(accumulate(sizes, initial=0))]
        super().__init__(parameters, room, empty, feedback, weight_at=self._in_flat[-1].stop, apart=True)
        self.compresses = True
        self._directions = np.empty_like(self._second)
        self.new_generation()

    @property
    def divisible(self) -> bool:
        """False: the first reduction does not sum gradients; see `Bucket`."""
        return False

    def _allocate(self) -> None:
        super()._allocate()
        self._second = self._empty(self._in_second[-1].stop, self.flat.dtype)
        self._own = np.empty_like(self._second)
        self._values = np.empty(self._count, self.flat.dtype)
        self._left = self._values

    def new_generation(self) -> None:
        """Gives all ranks, newcomers too, the same directions to begin with."""
        for number, part in enumerate(self._in_second):  # of NumPy's generators only raw bits never change
            raw = np.random.PCG64(number).random_raw(part.stop - part.start)
            self._directions[part] = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5

    def second(self) -> NDArray[Any]:
        """Returns, after the first reduction, the array that the second reduction sums in place."""
        with np.errstate(all="ignore"):  # infinities are allowed here
            for matrix, p, q in self._matrices(self._second).values():
                _orthonormalise(p)
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
            for matrix, p, q in self._matrices(self._directions).values():
                np.matmul(matrix, q, out=p)
        for place, part, small in zip(self._in_homes, self._in_flat, self._shrinks, strict=True):
            if not small:
                self.flat[part] = self._left[place]

    def _decode(self, total: float, *, divided: bool) -> None:
        assert self._apart is not None
        assert not divided
        if not self.compresses:
            if total != 1:
                np.divide(self._apart, total, out=self._apart)
            return
        own, directions = self._matrices(self._own), self._matrices(self._directions)
        with np.errstate(all="ignore"):
            for number, (matrix, p, q) in self._matrices(self._second).items():
                if np.isfinite(q).all():  # q is a sum, so all ranks decide alike
                    directions[number][2][...] = q
                matrix -= p @ own[number][2].T
                if not np.isfinite(matrix).all():  # would spoil all later steps
                    matrix[~np.isfinite(matrix)] = 0
                np.divide(q, total, out=q)
                n, m = self._sides[number]
                home = self._apart[self._in_homes[number]].reshape(n, m)
                found = np.multiply.outer(p[:, 0], q[:, 0])
                term = np.empty_like(found)
                for k in range(1, self._rank):
                    np.add(found, np.multiply.outer(p[:, k], q[:, k], out=term), out=found)
                home[...] = found
        for place, part, small in zip(self._in_homes, self._in_flat, self._shrinks, strict=True):
            if not small:
                self._apart[place] = self.flat[part] / self.flat.dtype.type(total)
                self._left[place] = 0
        self.memory.wrote()

    def _matrices(self, second: NDArray[Any]) -> dict[int, tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Returns views by number of the parameter: the remaining error, P, and Q in an array of all Q."""
        found = {}
        for number, (n, m) in enumerate(self._sides):
            if self._shrinks[number]:
                p = self.flat[self._in_flat[number]].reshape(n, self._rank)
                q = second[self._in_second[number]].reshape(m, self._rank)
                found[number] = (self._left[self._in_homes[number]].reshape(n, m), p, q)
        return found


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
