"""A few numbers that travel in another all_reduce, which saves a message of their own."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["PIGGYBACK_SIZE", "Piggyback"]

PIGGYBACK_SIZE = 25
"""Largest number of values."""


class Piggyback(Protocol):
    """Small whole numbers, whose sums are exact in any float dtype."""

    values: NDArray[np.float64]
    """This rank's numbers, at most PIGGYBACK_SIZE."""

    def arrive(self, sums: NDArray[Any]) -> None:
        """Called with the sums over all ranks; the array is the caller's."""
