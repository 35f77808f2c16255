"""Which elements of which parameters lie in which part of a flat array. Pure.

The parameters of a unit lie side by side in one array of W * S elements, in their order, zeros at the end; rank r holds
elements r * S to (r + 1) * S. So one collective serves all of them, any size fits any world, and a gathered array
needs no copy to be used: each parameter is a view of it.

W ranks, N elements in all, S elements in a part, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

__all__ = ["Layout"]


class Layout:
    """Where parameters lie.

    Args:
        shapes: of the P parameters.
        world: W.

    Attributes:
        size: N.
        part: S, the smallest for which W * S >= N.
        places: for each parameter its place in the flat array.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], world: int) -> None:
        sizes = [prod(shape) for shape in shapes]
        ends = list(accumulate(sizes))
        self.world = world
        self.size = sum(sizes)
        self.part = -(-self.size // world)
        self.places = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    @property
    def padded(self) -> int:
        """W * S."""
        return self.world * self.part

    def own(self, rank: int) -> slice:
        """The place of a rank's part in the flat array."""
        return slice(rank * self.part, (rank + 1) * self.part)

    def pieces(self, rank: int) -> list[slice]:
        """For each parameter the place of its elements within a rank's part; empty where the rank has none."""
        start, end = rank * self.part, (rank + 1) * self.part
        clipped = [(min(max(p.start, start), end), min(max(p.stop, start), end)) for p in self.places]
        return [slice(lo - start, hi - start) for lo, hi in clipped]

    def starts(self, rank: int) -> list[int]:
        """For each parameter the number of its first element that the rank has."""
        return [
            piece.start + rank * self.part - place.start if piece.stop > piece.start else 0
            for piece, place in zip(self.pieces(rank), self.places, strict=True)
        ]
