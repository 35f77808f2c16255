"""Reports of a job's members: how far they are, and what their scripts log. Pure.

It is told the time. `Tally` keeps one for each job, over all views.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from paceline_protocol.coordinator import Heard, JobState, Session
from paceline_server.measures import Rate
from paceline_server.slow_members import SlowMembers
from paceline_server.stalls import Pace, who_holds_up
from pacelinepb import MOST_LOGGED
from pacelinepb.status_json import HEARTBEATS

_MEANS_S = 25e-6
"""Seconds for each value, for which the means of logged values are not computed anew."""

_LOOK_S = 0.5
"""Least seconds between two looks at whether a stall has begun."""

_QUIET_S = 30.0
"""Seconds after a stall in which no other counts for events and goodput: other events must have room."""


class Reports:
    """The reports of members, by heartbeats.

    `operations` are the collectives and messages that rank 0 has begun, and `total` is the last step that the job is to
    take, 0 without a loop over steps. `stalled_at` is since when a stall lasts of which there is an event.
    """

    def __init__(self, now: float) -> None:
        self.operations = self.total = 0
        self._speed = Rate(now)
        self._pace = Pace(now)
        self._slow = SlowMembers()
        self.stalled_at: float | None = None
        self._look_at = now  # when it is looked again whether the job hangs
        self._places: dict[str, tuple[int, int, int]] = {}  # collective, step and all operations, by member
        self._parts: dict[str, str] = {}  # what members wait in within parts of the group
        self._logged: dict[str, Mapping[str, float]] = {}  # by member of the last view, also of those that have left
        self._logged_anew, self._means, self._means_until = False, dict[str, float](), now

    def begin(self, now: float, members: Collection[str]) -> None:
        """Begins a new view of these members."""
        self._pace.begin(now)
        self._slow.begin()
        self._places = {id_: place for id_, place in self._places.items() if id_ in members}
        self._parts.clear()
        self._logged = {id_: told for id_, told in self._logged.items() if id_ in members}
        self._logged_anew = True

    def heard(self, now: float, event: Heard, session: Session, operations: int, *, was_before: bool) -> None:
        """Takes note of a heartbeat of a member of the view, which has begun so many operations since the one before.

        `was_before` is True if this is all that an earlier coordinator has seen of it.
        """
        member_id, counters, is_first = event.member_id, event.counters, session.rank == 0
        if counters.logged:
            self._logged[member_id], self._logged_anew = counters.logged, True
        self.total = counters.total or self.total
        self._parts[member_id] = counters.part
        self._slow.heard(now, event, session)
        if is_first and operations > 0:
            self.operations += operations
            self._speed.reach(now, self.operations)
        before = self._places.get(member_id)
        place = self._places[member_id] = event.progress.operation, event.progress.step, counters.operations
        if was_before:
            self._pace.stood_since(event.progress.since)
        elif place != before:
            self._pace.moved(now, is_first=is_first)

    def operations_per_second(self, now: float) -> float:
        """Returns the operations of each of the last 10 s."""
        return self._speed.per_second(now)

    def logged(self, now: float) -> dict[str, float]:
        """Returns what members have logged last, by name: the means over those that log the name.

        Of many values the means may be a moment old: to compute them takes 0.5 us for each value.
        """
        if self._logged_anew and now >= self._means_until:
            values: dict[str, list[float]] = {}
            for told in self._logged.values():
                for name, value in told.items():
                    if name in values or len(values) < MOST_LOGGED:
                        values.setdefault(name, []).append(value)
            self._means = {name: sum(each) / len(each) for name, each in values.items()}
            self._logged_anew = False
            self._means_until = now + _MEANS_S * sum(map(len, values.values()))
        return self._means

    def slow(self, state: JobState) -> str:
        """Says which members compute for longer than the others; empty if none does."""
        return self._slow.text if state.live is not None and state.finished is None else ""

    def stall_changed(self, now: float, state: JobState) -> str:
        """Returns a sentence if a stall has begun or ended since it was asked last, once for each; else nothing.

        A job of 1,000 members asks 2,000 times a second, and looks at all of them only while nobody gets further.
        """
        if self.stalled_at is not None:
            if self._pace.moved_at == self.stalled_at and state.finished is None:
                return ""
            seconds, self.stalled_at = now - self.stalled_at, None
            self._look_at = now + _QUIET_S
            return f"the job goes on after {seconds:.0f} s"
        if now < self._look_at:
            return ""
        self._look_at = now + _LOOK_S
        stall = self.stall(now, state)
        if stall is None:
            return ""
        self.stalled_at = self._pace.moved_at
        return f"the job is stalled: {stall[1]}"

    def stall(self, now: float, state: JobState) -> tuple[float, str] | None:
        """Returns for how many seconds the job has hung, and for whom its members wait; None if it does not hang."""
        view = state.live
        if view is None or state.finished is not None:
            return None
        heartbeat = view.settings.failure_timeout / HEARTBEATS
        seconds = self._pace.stands_for(now, heartbeat)
        if seconds is None:
            return None
        there = [session for seat in view.seats if (session := state.sessions.get(seat.member_id)) is not None]
        text = who_holds_up(now, there, self._parts, heartbeat)
        return (seconds, text) if text else None
