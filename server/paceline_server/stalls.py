"""Whether a job hangs, and which members the others wait for. Pure: it is told the time.

Each member's heartbeat says which collective it is at. In a job that hangs these numbers stand still while members wait
inside a collective. A slow step looks the same for a while, so what is long depends on how long this job usually takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline_protocol import rank_name
from paceline_protocol.coordinator import Session

LEAST_S = 2.0
"""The least seconds without progress that count as a stall."""

_TIMES = 3
"""How many times as long as usual a stall is at least."""

_GAPS = 8
"""Times between two signs of progress of which the longest is usual."""

_NAMED = 2
"""Members that are named; of more it says how many."""


class Pace:
    """When the members of a view got further last, and how long they usually take."""

    def __init__(self, now: float) -> None:
        self.begin(now)

    def begin(self, now: float) -> None:
        """Begins anew, with a new view."""
        self._moved_at = self._first_moved_at = now
        self._gaps: deque[float] = deque(maxlen=_GAPS)

    def moved(self, now: float, *, is_first: bool) -> None:
        """Takes note that a member has got further; `is_first` if it is rank 0, whose times say what is usual."""
        self._moved_at = now
        if is_first:
            self._gaps.append(now - self._first_moved_at)
            self._first_moved_at = now

    def stands_for(self, now: float, heartbeat: float) -> float | None:
        """Returns the seconds since a member has got further; None if they are no more than usual.

        `heartbeat` is the seconds between two heartbeats, before which nothing is known.
        """
        seconds = now - self._moved_at
        return seconds if seconds >= max(LEAST_S, 2 * heartbeat, _TIMES * max(self._gaps, default=0.0)) else None


def who_holds_up(now: float, members: Sequence[Session]) -> str:
    """Says which members of a view the others wait for, and where; empty if nobody waits inside a collective."""
    lanes: dict[int, list[Session]] = {}
    for session in members:
        lanes.setdefault(session.position, []).append(session)  # each counts its operations by itself
    for lane in lanes.values():
        if text := _holds_up(now, lane):
            return text
    return ""


def _holds_up(now: float, members: Sequence[Session]) -> str:
    inside = [session for session in members if session.progress.inside]
    if not inside:
        return ""
    ahead = max(inside, key=lambda session: session.progress.operation).progress
    where = f"{ahead.doing or 'operation'} {ahead.operation}"
    late = [session for session in members if session.progress.operation < ahead.operation]
    silent = [session for session in members if session.stream is None or now - session.heard > LEAST_S]
    if silent:
        return f"{_names(silent)} {'does' if len(silent) == 1 else 'do'} not answer, others are in {where}"
    if late:
        return f"{_names(late)} {'has' if len(late) == 1 else 'have'} not entered {where}"
    if len(inside) == len(members):
        return f"all {len(members)} workers are in {where}" if len(members) > 1 else f"{_names(members)} is in {where}"
    return f"{_names(inside)} {'is' if len(inside) == 1 else 'are'} still in {where}"


def _names(members: Sequence[Session]) -> str:
    named = [
        f"{rank_name(session.rank or 0, session.settings.replica_size)} ({session.process.host})"
        for session in members[:_NAMED]
    ]
    more = len(members) - len(named)
    if more:
        return f"{', '.join(named)} and {more} more"
    return " and ".join(named)
