"""Measures of a job: how long something takes, and how often it happens. Pure: they are told the time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_RATE_S = 10.0
"""Seconds over which a rate is measured."""

_MARKS = 64
_MARK_S = 0.25
"""The most moments that are kept for a rate, and the least seconds between two."""


@dataclass(slots=True)
class Histogram:
    """How often something took how many seconds."""

    bounds: tuple[float, ...] = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
    counts: list[int] = field(default_factory=list)
    """For each bound the number of values up to it and above the one before; the last one is of values above all."""
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        """Adds a value; below 0 counts as 0."""
        seconds = max(0.0, seconds)
        place = next((i for i, bound in enumerate(self.bounds) if seconds <= bound), len(self.bounds))
        self.counts[place] += 1
        self.total += seconds


class Rate:
    """How often in a second something happened lately, from a count that does not fall."""

    def __init__(self, now: float) -> None:
        self._count = 0
        self._marks: deque[tuple[float, int]] = deque([(now, 0)], maxlen=_MARKS)

    def reach(self, now: float, count: int) -> None:
        """Takes note of the count."""
        self._count = count
        if now > self._marks[-1][0] + _MARK_S:
            self._marks.append((now, count))

    def per_second(self, now: float) -> float:
        """Returns the rate over the last 10 s."""
        while len(self._marks) > 1 and self._marks[1][0] < now - _RATE_S:
            self._marks.popleft()
        since, before = self._marks[0]
        return (self._count - before) / max(now - since, 1.0) if since > now - 2 * _RATE_S else 0.0
