"""Which members of a view compute for longer than the others, so that those wait for them in each step. Pure.

It is told the time. A member that computes for longer waits less in collectives, so the times that members wait there
say which are slow, and how much time the others lose.
"""

from __future__ import annotations

from statistics import median_high
from typing import NamedTuple

from paceline_protocol.coordinator import Heard, Session
from paceline_server.stalls import names_of

WINDOW_S = 10.0
FEWEST = 4
"""The least seconds, and steps, over which members are compared: a step that takes long may be an exception."""

_LEAST_SHARE = 0.2
_LEAST_S = 0.05
"""A member is slow if the others wait longer by this share of their time, and by so many seconds in each step."""


class _Mark(NamedTuple):
    at: float
    waited: float
    step: int
    operation: int
    session: Session


class SlowMembers:
    """Compares the members of a view, again and again. `text` says which were slow the last time; empty for none."""

    def __init__(self) -> None:
        self.text = ""
        self._first: dict[str, _Mark] = {}
        self._last: dict[str, _Mark] = {}

    def begin(self) -> None:
        """Begins a new view."""
        self.text = ""
        self._first.clear()
        self._last.clear()

    def heard(self, now: float, event: Heard, session: Session) -> None:
        """Takes note of a heartbeat of a member; compares all of them if it is rank 0's, and due."""
        progress = event.progress
        mark = _Mark(now, event.counters.in_collectives, progress.step, progress.operation, session)
        first = self._first.setdefault(event.member_id, mark)
        self._last[event.member_id] = mark
        if session.rank != 0 or now < first.at + WINDOW_S:
            return
        noun = "step" if mark.step else "operation"  # a job without a loop over steps has none
        count = mark.step - first.step if mark.step else mark.operation - first.operation
        if count >= FEWEST:
            self.text = self._compare((now - first.at) / count, noun)
            self._first, self._last = {}, {}

    def _compare(self, took: float, noun: str) -> str:
        """Says which members are slow, if a step takes so many seconds."""
        lanes: dict[
            int, list[tuple[float, Session]]
        ] = {}  # ranks with one position in their replicas wait for each other
        for id_, first in self._first.items():
            last = self._last[id_]
            if last.at - first.at >= WINDOW_S / 2:
                share = (last.waited - first.waited) / (last.at - first.at)  # members say what they want
                lanes.setdefault(last.session.position, []).append((max(0.0, min(1.0, share)), last.session))
        slow, others, longest = list[Session](), 0, 0.0
        for waits in lanes.values():
            usual = median_high(share for share, _ in waits)
            found = [(usual - share, session) for share, session in waits if share <= usual - _LEAST_SHARE]
            if found:
                slow += [session for _, session in found]
                others += len(waits) - len(found)
                longest = max(longest, *(less for less, _ in found))
        if not slow or (lost := took * longest) < _LEAST_S:
            return ""
        slow.sort(key=lambda session: session.rank or 0)
        are, them = ("is", "it") if len(slow) == 1 else ("are", "them")
        wait = "other waits" if others == 1 else "others wait"
        named = names_of(slow)
        return f"{named} {are} slow: the {wait} {lost:.{1 if lost >= 0.1 else 2}f} s for {them} in each {noun}"
