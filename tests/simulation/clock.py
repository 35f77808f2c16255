"""Simulated time: what is to happen, in order. Ties are broken by the order of asking, so a run repeats exactly."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Clock"]


class Clock:
    """A clock that jumps from one event to the next.

    Attributes:
        now: the time, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        """Has something done at a time."""
        self._asked += 1
        heapq.heappush(self._due, (max(time, self.now), self._asked, action, args))

    def after(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Has something done after a delay."""
        self.at(self.now + delay, action, *args)

    def advance(self) -> bool:
        """Jumps to the next event and does it; False if there is none."""
        if not self._due:
            return False
        self.now, _, action, args = heapq.heappop(self._due)
        action(*args)
        return True
