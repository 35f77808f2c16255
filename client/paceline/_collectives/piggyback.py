"""A few numbers that travel in another all_reduce, so that they need no message of their own."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["PIGGYBACK_SIZE", "Piggyback"]

PIGGYBACK_SIZE = 25
"""Most numbers in a piggyback."""


class Piggyback(Protocol):
    """Small whole numbers to be summed over all ranks; their sums are exact in any float dtype."""

    values: NDArray[np.float64]
    """This rank's numbers, at most PIGGYBACK_SIZE."""

    def arrive(self, sums: NDArray[Any]) -> None:
        """Receives the sums over all ranks; the array belongs to the caller."""
