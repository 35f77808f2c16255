"""Decides how many spare processes a launcher keeps, and when it starts the next one. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Sequence

_PAUSE_S = 0.5
"""Seconds after a worker's start before a spare starts, so that the worker has the cores to itself while it joins."""

_SPARE_FIRST_DELAY_S, _SPARE_LONGEST_DELAY_S = 1.0, 60.0
"""Seconds between a failed spare and the next, doubled each time up to the longest."""


def default_spares(command: Sequence[str], restarts: int) -> int:
    """Returns the default number of spares: one if it is useful, else none."""
    return 0 if spares_error(command, restarts, 1) else 1


def spares_error(command: Sequence[str], restarts: int, spares: int) -> str:
    """Says why a launcher cannot keep so many spares; empty if it can."""
    if spares < 0:
        return f"--spares must be 0 or more, not {spares}"
    if spares and not restarts:
        return f"--spares {spares} replaces workers that are restarted: give --restarts too"
    if spares and command[0] == "--":
        return f"--spares {spares} does not go with --no-python: only a Python script's imports can be done in advance"
    return ""


class SpareSchedule:
    """Decides when a launcher starts spares, of which it keeps at most `limit`.

    A spare that dies before it is needed is replaced after a pause, which doubles from 1 s to 60 s, because the cause
    (such as lack of memory) may kill the next one too. The pause is short again once a spare has become a worker.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next_at = 0.0
        self._delay = _SPARE_FIRST_DELAY_S

    def worker_started(self, now: float, from_spare: bool) -> None:
        """Records that a worker was started."""
        self._next_at = max(self._next_at, now + _PAUSE_S)
        if from_spare:
            self._delay = _SPARE_FIRST_DELAY_S

    def failed(self, now: float) -> None:
        """Records that a spare died or could not be started."""
        self._next_at = max(self._next_at, now + self._delay)
        self._delay = min(2 * self._delay, _SPARE_LONGEST_DELAY_S)

    def wanted(self, restartable: int) -> int:
        """Returns how many spares are useful: no more than the workers that may be restarted."""
        return min(self._limit, restartable)

    def due_at(self, spares: int, restartable: int) -> float | None:
        """Returns when to start the next spare; None if there are enough for the workers that may be restarted."""
        return self._next_at if spares < self.wanted(restartable) else None
