"""Chooses the workers that are asked whether silent members of their host have ended, and when they are asked again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline_protocol._events import Send
from paceline_protocol._job_state import Session
from paceline_protocol._values import Seat
from paceline_protocol.messages import Missing

Sight = tuple[str, str, int]
"""`Process.sight`: processes with the same one can tell whether the others are still there."""

_FIRST_S, _LONGEST_S = 0.1, 5.0
"""Shortest and longest pause in seconds between two questions. A process with much memory takes seconds to die."""

_NAMED = 64
"""Most members in one question; the question about more is divided among several workers."""

_NEVER = float("inf")


@dataclass(slots=True)
class _Search:
    """The search for the silent members of one host."""

    asked: frozenset[str] = frozenset()
    due: float = -_NEVER
    pause: float = _FIRST_S
    turn: int = 0


class Lookouts:
    """Asks workers whether silent members of their host have ended: then nobody need wait for these members.

    A member that has not ended yet may do so at any time, so the question is repeated, after pauses that double, for as
    long as somebody waits. Of each host one worker is asked, and another one each time: it may be frozen, or dying.
    """

    def __init__(self) -> None:
        self._missing: Mapping[Sight, Sequence[Seat]] = {}
        self._searches: dict[Sight, _Search] = {}  # of hosts with somebody to ask
        self.ask_at = _NEVER

    def look(self, now: float, missing: Mapping[Sight, Sequence[Seat]], waiting: Collection[Session]) -> list[Send]:
        """Asks what is due now; `missing` has the silent members, by the processes that could see them."""
        self._missing = missing
        sights = {session.process.sight for session in waiting}
        self._searches = {sight: each for sight, each in self._searches.items() if sight in missing and sight in sights}
        return self.look_too(now, waiting)

    def look_too(self, now: float, waiting: Collection[Session]) -> list[Send]:
        """Asks what is due now, when these workers have begun to wait and nothing else has changed."""
        by_sight: dict[Sight, list[Session]] = {}
        for session in waiting:
            if (sight := session.process.sight) is not None and sight in self._missing:
                by_sight.setdefault(sight, []).append(session)
        questions: list[Send] = []
        for sight, sessions in by_sight.items():
            questions += _ask(now, self._searches.setdefault(sight, _Search()), self._missing[sight], sessions)
        self.ask_at = min((search.due for search in self._searches.values()), default=_NEVER)
        return questions


def _ask(now: float, search: _Search, seats: Sequence[Seat], sessions: Sequence[Session]) -> Iterator[Send]:
    names = frozenset(seat.member_id for seat in seats)
    if not names <= search.asked:
        search.due, search.pause = now, _FIRST_S
    if now < search.due:
        return
    search.asked, search.due, search.pause = names, now + search.pause, min(2 * search.pause, _LONGEST_S)
    for first in range(0, len(seats), _NAMED):
        asked = sessions[search.turn % len(sessions)]
        search.turn += 1
        processes = tuple(seat.process for seat in seats[first : first + _NAMED])
        yield Send(asked.member_id, Missing(processes))
