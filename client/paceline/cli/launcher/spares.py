"""How many warm processes a launcher keeps, and when it starts the next one. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SpareSchedule", "default_spares", "spares_error"]

_PAUSE_S = 0.5
"""After a worker was started: it has the cores to itself while it joins, and the warm-up comes after that."""

_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 60.0


def default_spares(command: Sequence[str], restarts: int) -> int:
    """How many spares a launcher keeps where nobody has said: one if it is of use.

    Args:
        command: SCRIPT ARGS..., -m MODULE ARGS..., or -- PROGRAM ARGS...
        restarts: how often each worker is started again at most.
    """
    return 0 if spares_error(command, restarts, 1) else 1


def spares_error(command: Sequence[str], restarts: int, spares: int) -> str:
    """Why there cannot be so many spares; empty if there can."""
    if spares < 0:
        return f"--spares must be 0 or more, not {spares}"
    if spares and not restarts:
        return f"--spares {spares} is for workers that are started again: give --restarts too"
    if spares and command[0] == "--":
        return f"--spares {spares} does not go with --no-python: only Python's imports can be done early"
    return ""


class SpareSchedule:
    """Decides when one launcher starts spares.

    A spare that dies before it is needed is replaced after a pause, which doubles from 1 s to 60 s: what killed it
    (no memory, say) may kill the next one too. The pause is short again once a spare has become a worker.

    Args:
        limit: how many spares there are at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next_at = 0.0
        self._delay = _FIRST_DELAY_S

    def worker_started(self, now: float, from_spare: bool) -> None:
        """A worker was started."""
        self._next_at = max(self._next_at, now + _PAUSE_S)
        if from_spare:
            self._delay = _FIRST_DELAY_S

    def failed(self, now: float) -> None:
        """A spare died, or could not be started."""
        self._next_at = max(self._next_at, now + self._delay)
        self._delay = min(2 * self._delay, _LONGEST_DELAY_S)

    def wanted(self, restartable: int) -> int:
        """How many spares are of use: no more than there are workers that may be started again."""
        return min(self._limit, restartable)

    def due_at(self, spares: int, restartable: int) -> float | None:
        """The time at which to start the next spare; None if there are enough.

        Args:
            spares: how many there are.
            restartable: how many workers may be started again.
        """
        return self._next_at if spares < self.wanted(restartable) else None
