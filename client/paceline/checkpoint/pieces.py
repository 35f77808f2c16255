"""Decides which rank writes what: cuts arrays and shards into pieces so that one rank writes each element. Pure.

If only one rank holds an array, that rank writes it. If several ranks hold the same arrays, they divide the work: the
bytes of all these arrays, one after the other, are cut into as many equal runs as there are holders. So parallel
writers have equal work, and a rank has few pieces however many arrays there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Shard:
    """A run of an array's elements in C order: the part of a sharded array that this rank holds, or wants.

    Attributes:
        values: the elements, n of them in any shape; referred to, not copied.
        start: number of the first element.
        shape: shape of the whole array.
        holder: this rank's place among the ranks that hold the same elements.
        holders: number of these ranks.

    Raises:
        ValueError: the elements lie outside the array, or the holder outside the holders.
    """

    values: NDArray[Any]
    start: int
    shape: tuple[int, ...]
    holder: int = 0
    holders: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start <= prod(self.shape) - self.values.size:
            raise ValueError(f"{self.values.size} elements from {self.start} on do not fit an array of {self.shape}")
        if not 0 <= self.holder < self.holders:
            raise ValueError(f"holder {self.holder} is not one of {self.holders} holders")


class Piece(NamedTuple):
    """The part of one array that one rank writes.

    `shape` is the whole array's, and `start` is the number of the first element, in C order. `values` has shape [n],
    contiguous, little-endian.
    """

    path: str
    shape: tuple[int, ...]
    start: int
    values: NDArray[Any]


def pieces_of(arrays: Mapping[str, NDArray[Any] | Shard], rank: int, world: int) -> list[Piece]:
    """Returns the pieces that a rank writes, in the order of the file: wide elements first, so that all are aligned.

    All of the ranks that save together hold a plain array alike.
    """
    held: dict[tuple[int, int], list[tuple[str, Shard]]] = {}
    for path, array in sorted(arrays.items()):
        shard = array if isinstance(array, Shard) else Shard(array, 0, array.shape, rank, world)
        held.setdefault((shard.holder, shard.holders), []).append((path, shard))
    pieces = [piece for (holder, holders), group in held.items() for piece in _share(group, holder, holders)]
    return sorted(pieces, key=lambda piece: (-piece.values.itemsize, piece.path))


def _share(group: list[tuple[str, Shard]], holder: int, holders: int) -> list[Piece]:
    """Returns one holder's run of the arrays that all holders have; each of them computes the same cuts."""
    total = sum(shard.values.nbytes for _, shard in group)
    low, high = total * holder // holders, total * (holder + 1) // holders
    pieces, offset = [], 0
    for path, shard in group:
        size, width = shard.values.size, shard.values.itemsize
        first, last = (min(max(-(-(cut - offset) // width), 0), size) for cut in (low, high))
        offset += shard.values.nbytes
        if first < last or (holder == 0 and not prod(shard.shape)):  # one rank writes an array without elements too
            values = np.ascontiguousarray(shard.values, shard.values.dtype.newbyteorder("<")).reshape(-1)
            pieces.append(Piece(path, shard.shape, shard.start + first, values[first:last]))
    return pieces
