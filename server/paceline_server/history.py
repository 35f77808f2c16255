"""The course of one job from its beginning, in a bounded number of points. Pure: it is told the time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from typing import Any

MOST_POINTS = 300
"""The most points that are kept: 10 KB for a job that logs nothing, 90 KB with as many names as it may log."""

FIRST_INTERVAL_S = 0.5
"""Seconds between two points at first."""

MOST_COLUMNS = 48
"""The most columns: members choose the names of what they log. Later ones are left out."""


class History:
    """Points with a value in each column, NaN for none. When there are too many, every second one is dropped."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self.times = array("d")
        self._interval = FIRST_INTERVAL_S
        self._next = -math.inf

    def is_due(self, now: float) -> bool:
        """True if the next point may be added."""
        return now >= self._next

    def add(self, now: float, values: Mapping[str, float]) -> None:
        """Adds a point."""
        self._next = now + self._interval
        for name in values:
            if name not in self.columns and len(self.columns) < MOST_COLUMNS:
                self.columns[name] = array("d", [math.nan]) * len(self.times)
        self.times.append(now)
        for name, column in self.columns.items():
            column.append(values.get(name, math.nan))
        if len(self.times) > MOST_POINTS:
            self._interval *= 2
            self.times = self.times[::2]
            self.columns = {name: column[::2] for name, column in self.columns.items()}


def history_as_dict(history: History, wall_clock: Callable[[float], float]) -> dict[str, Any]:
    """Returns the points as JSON has them, by column, oldest first; a value that is no finite number is null.

    `wall_clock` converts a time to seconds since 1970. `NAME/KEY` columns are together in an object `NAME`.
    """
    shown: dict[str, Any] = {"at": [wall_clock(at) for at in history.times], "sent_bytes": {}, "logged": {}}
    for name, column in history.columns.items():
        kind, slash, key = name.partition("/")
        place = shown[kind] if slash else shown
        place[key or name] = [value if math.isfinite(value) else None for value in column]
    return shown
