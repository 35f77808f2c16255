"""What the compressed reductions of one array keep from call to call: memory for bytes, and what rounding left over.

Error feedback: what rounding takes away in one call is added to the values of the next, so nothing is ever lost, only
late. Then the sum of all results so far differs from the exact one by what is left over now, however many calls there
were. Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; the owner's part (its own rounding of
the total) as in Tang et al., "DoubleSqueeze", ICML 2019.

It is this rank's own: other ranks have other leftovers, a newcomer has none, and it is no part of the replicated state
(I5). A step that is undone must leave it as it was, so there are two arrays: calls read the one and write the other,
and `commit` makes what was written the one that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SizeMismatch

__all__ = ["Memory"]


class Memory:
    """Of one array, for one call of `Group.all_reduce_compressed` at a time.

    Args:
        feedback: keep what rounding leaves over; without it only memory for bytes is kept.
    """

    def __init__(self, *, feedback: bool) -> None:
        self.feedback = feedback
        self._kept: NDArray[Any] | None = None
        self._next: NDArray[Any] | None = None
        self._written = False
        self._areas: dict[str, NDArray[np.uint8]] = {}

    def commit(self) -> None:
        """The calls since the last `commit` count: `undo` goes back to here."""
        if self._written:
            self._kept, self._next = self._next, self._kept
            self._written = False

    def undo(self) -> None:
        """The calls since the last `commit` never were."""
        self._written = False

    def successor(self) -> Memory:
        """The memory as `undo` leaves it, for calls while one that was given up still runs with this."""
        heir = Memory(feedback=self.feedback)
        heir._kept = self._kept  # which is only read
        return heir

    @property
    def left_over(self) -> NDArray[Any] | None:
        """What the next call adds to its values, shape [n]; None for nothing yet. A view: do not change it."""
        return self._next if self._written else self._kept

    # For the task of a call.

    def check(self, n: int, dtype: np.dtype[Any]) -> None:
        """Makes sure that this can be the memory of such an array.

        Raises:
            SizeMismatch: it is that of another.
        """
        for array in (self._kept, self._next):
            if array is not None and (array.shape != (n,) or array.dtype != dtype):
                raise SizeMismatch(f"this memory is of an array {array.dtype}[{array.size}], not of {dtype}[{n}]")

    def residuals(self, n: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """What to add, and where to put what is left over then, shape [n] both; perhaps the same array."""
        if self._kept is None:
            self._kept = np.zeros(n, dtype)
        if self._next is None:
            self._next = np.zeros(n, dtype)
        return (self._next if self._written else self._kept), self._next

    def wrote(self) -> None:
        """The call is complete: what it left over is there."""
        self._written = self.feedback

    def area(self, name: str, nbytes: int, empty: Callable[[int, Any], NDArray[Any]]) -> NDArray[np.uint8]:
        """Memory for bytes, of at least that size, the same as last time if it will do; shape [nbytes]."""
        area = self._areas.get(name)
        if area is None or area.size < nbytes:
            area = self._areas[name] = empty(nbytes, np.uint8)
        return area[:nbytes]
