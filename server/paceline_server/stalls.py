"""Whether a job hangs, and which members the others wait for. Pure: it is told the time.

Each member's heartbeat says which collective it is at. In a job that hangs these numbers stand still while members wait
inside a collective. A slow step looks the same for a while, so what is long depends on how long this job usually takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from paceline_protocol import rank_name
from paceline_protocol.coordinator import Session

LEAST_S = 2.0
"""The least seconds without progress that count as a stall."""

FIRST_S = 10.0
_FEWEST_GAPS = 3
"""The same until rank 0 has got further so many times: the first step may compile."""

_TIMES = 3
"""How many times as long as usual a stall is at least."""

_HALF_LIFE_S = 300.0
"""Seconds after which half of the longest gap is forgotten: an evaluation every few minutes is usual, too."""

_LONGEST_S = 60.0
"""The longest gap that counts as usual, so that the next stall is seen soon after a long one."""

_NAMED = 2
"""Members that are named; of more it says how many."""


class Pace:
    """How long members of a view usually take to get further, over all views; `moved_at` is when one last did."""

    def __init__(self, now: float) -> None:
        self.moved_at = self._first_moved_at = self._usual_at = now
        self._usual, self._gaps = 0.0, 0
        self._is_new = True  # nobody has told anything yet

    def begin(self, now: float) -> None:
        """Begins a new view."""
        self.moved_at = self._first_moved_at = now
        self._is_new = False

    def moved(self, now: float, *, is_first: bool) -> None:
        """Takes note that a member has got further; `is_first` if it is rank 0, whose times say what is usual."""
        self.moved_at, self._is_new = now, False
        if is_first:
            gap = min(now - self._first_moved_at, _LONGEST_S)
            self._usual, self._gaps = max(gap, self._remembered(now)), self._gaps + 1
            self._first_moved_at = self._usual_at = now

    def stood_since(self, at: float) -> None:
        """Takes note of since when a member is where it is, which an earlier coordinator has seen."""
        self.moved_at = at if self._is_new else max(self.moved_at, at)
        self._is_new = False

    def stands_for(self, now: float, heartbeat: float) -> float | None:
        """Returns the seconds since a member has got further; None if they are no more than usual.

        `heartbeat` is the seconds between two heartbeats, before which nothing is known.
        """
        seconds = now - self.moved_at
        least = LEAST_S if self._gaps >= _FEWEST_GAPS else FIRST_S
        return seconds if seconds >= max(least, 2 * heartbeat, _TIMES * self._remembered(now)) else None

    def _remembered(self, now: float) -> float:
        return self._usual * math.exp2((self._usual_at - now) / _HALF_LIFE_S)


def who_holds_up(now: float, members: Sequence[Session], parts: Mapping[str, str], heartbeat: float) -> str:
    """Says which members of a view the others wait for, and where; empty if nobody waits inside a collective.

    `parts` has what members wait in within parts of the group, by id.
    """
    lanes: dict[int, list[Session]] = {}
    for session in members:
        lanes.setdefault(session.position, []).append(session)  # each counts its operations by itself
    found = [_holds_up(now, lane, max(LEAST_S, 2 * heartbeat)) for lane in lanes.values()]
    blamed = [text for text, knows_whom in found if knows_whom]
    waiting = [text for text, _ in found if text]
    return (blamed or waiting or [_in_parts(members, parts)])[0]


def _holds_up(now: float, members: Sequence[Session], patience: float) -> tuple[str, bool]:
    """Returns a sentence, and whether it says for whom the others wait."""
    inside = [session for session in members if session.progress.inside]
    if not inside:
        return "", False
    ahead = max(inside, key=lambda session: session.progress.operation).progress
    where = f"{ahead.doing or 'operation'} {ahead.operation}"
    silent = [session for session in members if session.stream is None or now - session.heard > patience]
    late = [session for session in members if session.progress.operation < ahead.operation]
    if silent:
        return f"{names_of(silent)} {'does' if len(silent) == 1 else 'do'} not answer, others are in {where}", True
    if late:
        return f"{names_of(late)} {'has' if len(late) == 1 else 'have'} not entered {where}", True
    if len(inside) == len(members) > 1:
        return f"all {len(members)} workers are in {where}", False
    return f"{names_of(inside)} {'is' if len(inside) == 1 else 'are'} still in {where}", len(inside) < len(members)


def _in_parts(members: Sequence[Session], parts: Mapping[str, str]) -> str:
    """Names the members that wait in parts of the group, and the others; which members a part has is not known here."""
    inside = [session for session in members if parts.get(session.member_id)]
    others = [session for session in members if not parts.get(session.member_id)]
    if not inside:
        return ""
    text = f"{names_of(inside)} {'is' if len(inside) == 1 else 'are'} in {parts[inside[0].member_id]}"
    return f"{text}; {names_of(others)} {'is' if len(others) == 1 else 'are'} in none" if others else text


def names_of(members: Sequence[Session]) -> str:
    """Names some members in a sentence, at most `_NAMED` of them."""
    named = [
        f"{rank_name(session.rank or 0, session.settings.replica_size)} ({session.process.host})"
        for session in members[:_NAMED]
    ]
    more = len(members) - len(named)
    if more:
        return f"{', '.join(named)} and {more} more"
    return " and ".join(named)
