"""Paces lines of log. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable

__all__ = ["Remarks"]


class Remarks:
    """Says when a line of log is due about things that strangers can make happen any number of times.

    Args:
        period: seconds between two lines about one kind.
    """

    def __init__(self, period: float) -> None:
        self._period = period
        self._kinds: dict[Hashable, tuple[float, int]] = {}  # when the last line was due, and how many came since

    def count(self, kind: Hashable, now: float) -> int:
        """Counts one; returns how many have come since the last line if another is due, else 0.

        Args:
            kind: what has happened. There must be few kinds: all are remembered.
            now: the time, in seconds.
        """
        said, unsaid = self._kinds.get(kind, (-math.inf, 0))
        is_due = now - said >= self._period
        self._kinds[kind] = (now, 0) if is_due else (said, unsaid + 1)
        return unsaid + 1 if is_due else 0
