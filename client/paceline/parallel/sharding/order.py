"""In which order units run, learned from pass to pass, so that the next one's parameters can be fetched ahead. Pure.

All ranks run the same program, so they see the same order. They take it for their next guess only when all know that
all have seen a whole pass (`commit`): a rank whose pass failed must not guess otherwise than the others. Where a guess
is wrong, nothing is fetched ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Order"]


class Order:
    """The order of one kind of pass.

    Args:
        guess: numbers of the units as they will come in the first pass.
    """

    def __init__(self, guess: Sequence[int]) -> None:
        self._guess = list(guess)
        self._seen: list[int] = []
        self.is_complete = False
        """The last pass ended well, and its order is not the guess yet."""

    def start(self) -> None:
        """A pass begins."""
        self._seen = []
        self.is_complete = False

    def enter(self, unit: int, count: int) -> list[int]:
        """A unit begins to run; the next units, at most `count`, as far as they can be told."""
        self._seen.append(unit)
        here = len(self._seen)
        return self._guess[here : here + count] if self._guess[here - 1 : here] == [unit] else []

    def first(self, count: int) -> list[int]:
        """The units that the next pass begins with."""
        return self._guess[:count]

    def end(self) -> None:
        """The pass is complete."""
        self.is_complete = True

    def commit(self) -> None:
        """All ranks' last pass is complete: the next is expected to be like it."""
        self._guess = list(self._seen)
        self.is_complete = False
