"""A few numbers that ride in somebody else's all_reduce, and spare a message of their own."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["PASSENGER_SIZE", "Passenger"]

PASSENGER_SIZE = 25
"""Numbers for which there is room."""


class Passenger(Protocol):
    """Small whole numbers, which add up exactly in any float dtype."""

    values: NDArray[np.float64]
    """To be added up over all ranks; at most PASSENGER_SIZE."""

    def arrive(self, sums: NDArray[Any]) -> None:
        """They have been added up; the array is the caller's."""
