"""Counts events of the coordinator itself, beside its jobs, for those who operate it. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from paceline_server.errors import Refused
from paceline_server.limits import Budget, Places
from paceline_server.measures import Histogram

_STALLS = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Vitals:
    """The counts of one coordinator; each part of it adds its own.

    Refusals, of calls and HTTP requests, are by `ErrorReason`. `stalls` are the seconds for which the loop did not run,
    each time. The budgets are by what they are for.
    """

    def __init__(self) -> None:
        self.refusals: Counter[int] = Counter()
        self.stalls = Histogram(_STALLS)
        self.longest_stall = 0.0
        self.memory: dict[str, Budget] = {}
        self.places: dict[str, Budget | Places[Any]] = {}

    def refused(self, refused: Refused) -> None:
        """Counts a refusal."""
        self.refusals[refused.reason] += 1

    def stalled(self, seconds: float) -> None:
        """Counts a stall of the loop."""
        self.stalls.add(seconds)
        self.longest_stall = max(self.longest_stall, seconds)
