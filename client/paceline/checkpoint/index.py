"""Where each array of a checkpoint lies: from what the manifest says of its parts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from paceline.checkpoint.part import Part
from paceline.signature import dtype_named

__all__ = ["Run", "Stored", "index_of"]


class Run(NamedTuple):
    """Elements of an array that lie in one file. Runs sort by their first element.

    Attributes:
        start: number of the first element.
        elements: how many.
        part: number of the part.
        offset: of the first byte in the part's file.
    """

    start: int
    elements: int
    part: int
    offset: int


class Stored(NamedTuple):
    """An array.

    Attributes:
        dtype: of its elements.
        shape: of the whole.
        runs: what it consists of, in order; each element is in one.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    runs: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * int(self.dtype.itemsize)


def index_of(parts: Sequence[Part]) -> dict[str, Stored]:
    """The arrays by path.

    Args:
        parts: all of a checkpoint, in order.

    Raises:
        ValueError: a part is missing, two disagree on an array, or an element is in none or in two.
    """
    numbers = [(part.number, part.parts) for part in parts]
    if not parts or numbers != [(n, len(parts)) for n in range(len(parts))]:
        raise ValueError(f"these are not all parts of one checkpoint: {numbers!s:.200}")
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    runs: dict[str, list[Run]] = {}
    for part in parts:
        for entry, offset in part.places():
            if kinds.setdefault(entry.path, (entry.dtype, entry.shape)) != (entry.dtype, entry.shape):
                raise ValueError(f"the parts disagree on dtype or shape of {entry.path!r:.80}")
            runs.setdefault(entry.path, []).append(Run(entry.start, entry.elements, part.number, offset))
    index: dict[str, Stored] = {}
    for path, (dtype, shape) in kinds.items():
        found, end = sorted(runs[path]), 0
        for run in found:
            if run.start != end:
                where = "no part" if run.start > end else "two parts"
                raise ValueError(f"{path!r:.80}: element {min(run.start, end)} is in {where}")
            end += run.elements
        if end != prod(shape):
            raise ValueError(f"{path!r:.80}: element {end} is in no part")
        index[path] = Stored(dtype_named(dtype), shape, tuple(found))
    return index
