"""Whole numbers of 8 bits on the wire, scaled block by block: a quarter of the bytes of float32, and a little more.

Letters: n elements, b elements of a block, m the largest |x| of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.compression.codec import PIECE

__all__ = ["Int8"]

_SMALLEST = np.float32(2.0**-119)
"""Blocks with a smaller m become zeros: here m / 127 and 127 / m are normal float32 still."""


@dataclass(frozen=True)
class Int8:
    """Rounds x to the nearest of 255 multiples of m / 127, where m is the largest |x| of its block.

    A piece of n elements is ceil(n / b) scales, float32, then n numbers, int8.

    **Error** of one rounding of x: at most m / 254 (1 + 2^-12), the second factor for the arithmetic itself, or m, if m
    is below 2^-119: such a block becomes zeros. A block that has an infinity or a NaN becomes all NaN, so that nobody
    takes it for a small number. For |x| up to 2^127, beyond which 127 times the scale may overflow.

    Of an all_reduce, each element: at most 1/126 of the sum of the ranks' m of its block, plus W 2^-118 and what
    adding up W float32 may round, and for a mean a W-th of that. Derived in DESIGN.md, section 10. Small values
    beside a large one are lost in a single call; with error feedback they arrive, later.

    Args:
        block: b, 1 to 65,536.
        feedback: whether DDP adds what was rounded away to the next step's gradients.
    """

    block: int = 1024
    feedback: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.block <= PIECE:
            raise ValueError(f"a block has 1 to {PIECE} elements, not {self.block!r}")

    def __str__(self) -> str:
        return f"int8 block={self.block}"

    def nbytes(self, n: int) -> int:
        """1 for each, and 4 for each block."""
        return n + 4 * -(-n // self.block)

    def encode(self, x: NDArray[np.float32], into: NDArray[np.uint8], scratch: NDArray[np.float32]) -> None:
        """See `Codec`."""
        scales, codes = self._parts(into, x.size)
        np.abs(x, out=scratch)
        for elements, blocks, width in self._stripes(x.size):
            rows = scratch[elements].reshape(-1, width)
            largest = rows.max(axis=1)  # NaN if there is one
            finite, small = np.isfinite(largest), largest < _SMALLEST
            with np.errstate(all="ignore"):
                scales[blocks] = np.where(finite, np.where(small, 0, largest / np.float32(127)), np.nan)
                factors = np.where(finite & ~small, np.float32(127) / largest, 0).astype(np.float32)
                np.multiply(x[elements].reshape(-1, width), factors[:, np.newaxis], out=rows)
                np.rint(rows, out=rows)
                codes[elements] = scratch[elements]  # of a NaN any number: its scale is NaN

    def decode(self, data: NDArray[np.uint8], into: NDArray[np.float32]) -> None:
        """See `Codec`."""
        scales, codes = self._parts(data, into.size)
        into[...] = codes
        for elements, blocks, width in self._stripes(into.size):
            rows = into[elements].reshape(-1, width)
            with np.errstate(all="ignore"):  # a scale may be anything
                np.multiply(rows, scales[blocks][:, np.newaxis], out=rows)

    def _parts(self, data: NDArray[np.uint8], n: int) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
        end = len(data) - n
        return data[:end].view(np.float32), data[end:].view(np.int8)

    def _stripes(self, n: int) -> Iterator[tuple[slice, slice, int]]:
        """Whole blocks, then the last one if it is shorter: (elements, blocks, elements of each block)."""
        whole = n // self.block
        if whole:
            yield slice(0, whole * self.block), slice(0, whole), self.block
        if n % self.block:
            yield slice(whole * self.block, n), slice(whole, whole + 1), n % self.block
