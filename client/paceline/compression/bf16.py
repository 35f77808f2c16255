"""bfloat16 on the wire: half the bytes of float32, and its range."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bf16"]


@dataclass(frozen=True)
class Bf16:
    """Rounds to the nearest bfloat16, ties to even.

    **Error** of one rounding of x: at most 2^-8 |x|, and at most 2^-134 where |x| is below the smallest normal number
    (2^-126). Infinities and NaN stay what they are; what lies beyond bfloat16's largest number, 2^128 (1 - 2^-9),
    becomes infinite.

    Of an all_reduce, each element: at most (1/127 + W 2^-20) times the sum of the ranks' |x|, plus W 2^-133, and for a
    mean a W-th of that. Derived in DESIGN.md, section 10.
    """

    feedback: bool = False
    block: int = 1

    def __str__(self) -> str:
        return "bf16"

    def nbytes(self, n: int) -> int:
        """2 for each."""
        return 2 * n

    def encode(self, x: NDArray[np.float32], into: NDArray[np.uint8], scratch: NDArray[np.float32]) -> None:
        """See `Codec`."""
        import ml_dtypes  # here, because few jobs need it and it costs start-up time

        into.view(ml_dtypes.bfloat16)[...] = x

    def decode(self, data: NDArray[np.uint8], into: NDArray[np.float32]) -> None:
        """See `Codec`."""
        import ml_dtypes

        into[...] = data.view(ml_dtypes.bfloat16)
