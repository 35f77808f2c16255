"""Finds members that are silent, do not stop, or have gone: all that the coordinator concludes from time alone.

`Leases` evict members that say nothing, `Stragglers` those whose session is alive and that do not stop. `Abandonment`
lets an operator say in advance when a job without any connected member may begin anew. `Wakefulness` finds out whether
the coordinator itself was asleep, because then the silence of others means nothing.
"""

from __future__ import annotations

from paceline_protocol._job_state import JobState, Session, Standing
from paceline_protocol._values import View
from pacelinepb.v1.errors_pb2 import ErrorReason

LOOK_AGAIN = 0.02
"""Seconds between the look that finds a lease lapsed and the look that believes it: some rounds of the event loop."""


_CANDIDATE_S = 10.0
"""Seconds for which a candidate that has lost its stream keeps its place, unless it holds a share of a state that
others may wait for. `failure_timeout` is its own to say: a day of it must not keep the places of others."""

_NEVER = float("inf")

_OF_VIEW = (Standing.IN_VIEW, Standing.VOID)


class Leases:
    """The leases of a job's sessions: how long each member may be silent.

    A lease runs from the member's last message, from its stream's end, or from the end of a stall of the coordinator. A
    lapse counts only at the second of two looks. Between them the shell takes in what was in its inbox, so that a
    message that had arrived is never mistaken for silence.

    Heartbeats need the member's interpreter, which a call into C may hold for minutes. So when half of a lease has
    passed without a message, the member's door is asked: gRPC answers there on threads of its own. An answer counts
    like a heartbeat, for it shows that the process is neither stopped nor dead.

    The other members, a restart of the coordinator, or the silence of all may excuse a member's own silence. Without a
    stream nothing excuses it for longer than `longest`: the session ends, though the member may still train. It comes
    back as a newcomer, with the state that it holds.

    `lease_from` and `overdue_from` of the sessions are read and written here.
    """

    def __init__(self, state: JobState, longest: float) -> None:
        self._state = state
        self._longest = longest
        self._unseen_from: float | None = None
        self._unseen = any(session.lease_from is None for session in state.sessions.values())
        self._nobody_at = float("-inf")  # the last time at which no member of the line was heard
        # Heartbeats only move leases on, so a look may come early but never late: no heartbeat has to touch this.
        self.check_at = float("-inf") if state.sessions else float("inf")

    def began(self, session: Session) -> None:
        """Notes that a lease begins anew for another reason than a heartbeat."""
        assert session.lease_from is not None
        self.check_at = min(self.check_at, session.lease_from + _lease(session) / 2, self._last(session))

    def renew_after_stall(self, now: float, slept: float) -> None:
        """Begins leases anew if the coordinator did not run for longer than their heartbeat interval."""
        for session in self._state.sessions.values() if slept else ():
            if session.stream_ended is not None:  # no later than now: it may have ended since the stall
                session.stream_ended = min(now, session.stream_ended + slept)
            elif session.stream is None:
                session.heard = min(now, session.heard + slept)
            if slept > session.settings.heartbeat_interval:
                session.overdue_from = None
                if session.lease_from is not None:
                    session.lease_from = now
                else:
                    self._unseen_from = now

    def look(self, now: float) -> tuple[list[tuple[Session, str]], list[Session]]:
        """The sessions to end because of silence, each with how it went, and those whose doors to ask now."""
        if now < self.check_at:
            return [], []
        self.check_at = float("inf")
        lapsed: list[tuple[Session, str]] = []
        asked: list[Session] = []
        unseen: list[Session] = []
        vouched: set[int] = set()  # positions
        somebody = False
        for session in self._state.sessions.values():
            lease_from = self._lease_from(session)
            if self._has_lapsed(now, session, min(lease_from + _lease(session), self._last(session))):
                lapsed.append((session, _how(now, session)))
            elif session.lease_from is None:
                unseen.append(session)
            else:
                if self._is_to_ask(now, session, lease_from):
                    asked.append(session)
                if session.standing is Standing.IN_VIEW:
                    vouched.add(session.position)
                recently = now - session.heard < 2 * session.settings.heartbeat_interval
                somebody |= session.standing in _OF_VIEW and session.stream is not None and recently
        lapsed += self._lapsed_unseen(now, unseen, vouched)
        if self._state.view is None or self._state.view.base is None:
            return lapsed, asked
        if not somebody:
            self._nobody_at = now
        # While no member of a line is heard, this coordinator may be the one that is cut off, and they train on:
        # evicting them would not help (I2). When the first is heard again, the others have time to come back, too.
        due: list[tuple[Session, str]] = []
        for session, how in lapsed:
            last = self._last(session)
            if session.standing not in _OF_VIEW or now >= min(self._nobody_at + _timeout(session), last):
                due.append((session, how))
            else:
                self.check_at = min(self.check_at, now + session.settings.heartbeat_interval, last)
        return due, asked

    def count_unseen(self, now: float) -> None:
        """Begins the leases of members that have not been seen since the restart: nobody vouches for them any more."""
        for session in self._state.sessions.values() if self._unseen else ():
            if session.lease_from is None:
                session.lease_from = now
                self.began(session)
        self._unseen = False

    def whereabouts(self, now: float, rank: int) -> str:
        """When a member of the view was last seen, for a list of missing members."""
        session = self._state.session_of(rank)
        if session is None:
            return "gone"
        if session.lease_from is None:
            return "not seen since the coordinator was started again"
        if session.stream_ended is not None:
            return f"disconnected {now - session.stream_ended:.1f} s ago"
        return f"last heard {now - session.heard:.1f} s ago"

    def _lease_from(self, session: Session) -> float:
        """From when the member's silence counts: infinity if it has not been seen since the restart."""
        if session.lease_from is None:
            return _NEVER
        if session.standing is Standing.IN_VIEW and not session.has_met:
            return max(session.lease_from, self._state.vouched_at)
        return session.lease_from

    def _last(self, session: Session) -> float:
        """When the session ends for want of a stream, whatever excuses its silence."""
        if session.stream is not None:
            return _NEVER
        return (session.heard if session.stream_ended is None else session.stream_ended) + self._longest

    def _has_lapsed(self, now: float, session: Session, due: float) -> bool:
        if now < due:
            session.overdue_from = None
        elif session.overdue_from is None:
            session.overdue_from = now
            due = now + LOOK_AGAIN
        elif now >= session.overdue_from + LOOK_AGAIN:
            return True
        else:
            due = session.overdue_from + LOOK_AGAIN
        self.check_at = min(self.check_at, due)
        return False

    def _is_to_ask(self, now: float, session: Session, lease_from: float) -> bool:
        """True if it is time to ask the member's door; notes that, or when it will be.

        A member without a stream is on its way back or gone: only its return proves anything.
        """
        if session.stream is None or session.overdue_from is not None:
            return False
        interval = session.settings.heartbeat_interval
        due = max(lease_from + _timeout(session) / 2, session.asked_door + interval)
        asks = now >= due
        if asks:
            session.asked_door, due = now, now + interval
        self.check_at = min(self.check_at, due)
        return asks

    def _lapsed_unseen(self, now: float, absent: list[Session], vouched: set[int]) -> list[tuple[Session, str]]:
        """Members of a stored view that have not been seen since the restart.

        As long as one member of the view is there, it vouches for them: it would report the end of its links, which go
        to ranks with its position. If no member is there to vouch, all of them together have `failure_timeout` to come
        back.
        """
        unseen = [session for session in absent if session.position not in vouched]
        if not unseen:
            self._unseen_from = None
            return []
        if self._unseen_from is None:
            self._unseen_from = now
        timeout = unseen[0].settings.failure_timeout
        if now < self._unseen_from + timeout:
            self.check_at = min(self.check_at, self._unseen_from + timeout)
            return []
        how = f"was not seen again within {timeout:g} s after the coordinator was started again"
        return [(session, how) for session in unseen]


def _lease(session: Session) -> float:
    """Seconds of silence that end the session."""
    timeout = session.settings.failure_timeout
    if session.standing is not Standing.CANDIDATE or session.stream is not None or session.holds_a_part:
        return timeout
    return min(timeout, _CANDIDATE_S)


def _how(now: float, session: Session) -> str:
    if session.lease_from is None:
        return f"was not seen again within {now - session.heard:.0f} s after the coordinator was started again"
    if session.stream_ended is not None:
        return f"lost its session and did not come back for {now - session.stream_ended:.1f} s"
    return f"was silent for {now - session.heard:.1f} s"


def _timeout(session: Session) -> float:
    return session.settings.failure_timeout


class Stragglers:
    """Members that do not stop although their generation is over.

    A member learns that its generation has failed at its next collective, so those that compute stop a little later,
    all at about the same time. Two clocks run:

    - When half of the members of a line have stopped, the rest have `failure_timeout`; so have, at once, members that a
      timeout is blamed on. A member that has not stopped by then hangs, although its session is alive: a data loader
      that never returns, threads that died for want of memory.
    - When one has stopped, all the others have its `step_timeout`, for a step may last that long: most of them may hang
      together, at a dead disk. Before the first step of a line this is the only clock: members load data and models.
      So it is while no failure is known: a member may evaluate between two steps, or this coordinator has forgotten
      the verdict because it was killed.

    The others go on without a member that has had its time. If it wakes up, it comes back as a newcomer.
    """

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._few = _Clock()
        self._all = _Clock()

    @property
    def due_at(self) -> float:
        """When members that have not stopped are evicted, infinity while nobody is waited for."""
        return min(self._few.at, self._all.at)

    def overdue(self, now: float) -> tuple[list[Session], float]:
        """The members to evict now, and the seconds that they had. Must be asked at every decision."""
        late, stopped = self._late()
        few = self._few_of(late, stopped)
        timeout = late[0].settings.failure_timeout if late else _NEVER
        patience = max([timeout, *(session.met.step_timeout for session in stopped if session.met is not None)])
        if self._all.rings(now, patience if late and stopped else None):
            return late, patience
        return (few, timeout) if self._few.rings(now, timeout if few else None) else ([], 0.0)

    def _late(self) -> tuple[list[Session], list[Session]]:
        """The members that should stop and have not, and those that have."""
        state = self._state
        if (
            state.view is None or state.finished is not None or not state.is_elastic
        ):  # members of a job that is done leave
            return [], []
        if state.verdict is None and state.view.base is None:  # some have not reached their first step
            return [], []
        late: list[Session] = []
        stopped: list[Session] = []
        for session in state.present():
            (stopped if session.has_met else late).append(session)
        return late, stopped

    def _few_of(self, late: list[Session], stopped: list[Session]) -> list[Session]:
        """The late members that have only `failure_timeout`."""
        view, verdict = self._state.view, self._state.verdict
        if view is None or verdict is None:
            return []
        if view.base is not None and len(late) <= len(stopped):
            return late
        if verdict.reason != ErrorReason.ERROR_REASON_TIMEOUT:
            return []
        return [session for session in late if session.rank in verdict.culprits]  # they have had the time of a step

    def renew_after_stall(self, slept: float) -> None:
        """Adds the seconds for which the coordinator did not run: it has yet to read what members said meanwhile."""
        if slept:
            for clock in (self._few, self._all):
                clock.renew(slept)


class _Clock:
    """A clock that rings when somebody has been waited for too long.

    It looks twice, as `Leases` does: what they said may still be in the inbox.
    """

    def __init__(self) -> None:
        self.at = _NEVER
        self._looked = False

    def rings(self, now: float, timeout: float | None) -> bool:
        """True if time is up. A timeout of None stops the clock, any other starts it unless it runs."""
        if timeout is None:
            self.at, self._looked = _NEVER, False
            return False
        self.at = min(self.at, now + timeout)
        if now < self.at:
            return False
        self._looked = not self._looked
        self.at = now + (LOOK_AGAIN if self._looked else timeout)  # again, should nobody be able to go on without them
        return not self._looked

    def renew(self, slept: float) -> None:
        """Adds seconds that do not count."""
        self.at += slept
        self._looked = False


class Abandonment:
    """When the members of a job's last generation may be declared dead, as an operator has allowed (--restart-after).

    Silence proves nothing (I2): a machine that is cut off may train on. So by default a job whose state may be on a
    silent machine waits for `paceline restart`. An operator who knows that silent machines do not come back, because
    something else starts them anew, may tell the coordinator to do it.

    Time counts while no member of the last generation has a stream: not before this process was started, and not while
    it did not run, because then no member could have come back.
    """

    def __init__(self, restart_after: float | None) -> None:
        self._restart_after = restart_after
        self._generation = 0
        self._since: float | None = None

    def due_at(self, now: float, state: JobState) -> float | None:
        """When to declare the members dead; None while there is no reason to. Must be asked after events."""
        if self._restart_after is None:
            return None
        view = state.view
        if view is None or not _is_deserted(state, view):
            self._since = None
            return None
        if self._since is None or self._generation != view.generation:
            self._generation, self._since = view.generation, now
        # If no worker waits, nothing is gained by it, and a member that holds the state may still come back.
        return self._since + self._restart_after if state.candidates() else None

    def slept(self, seconds: float) -> None:
        """Adds the seconds for which the coordinator did not run."""
        if self._since is not None:
            self._since += seconds

    def done(self, state: JobState) -> str:
        """Notes that the members are declared dead; returns a sentence for the log."""
        self._since = None
        generation = state.view.generation if state.view is not None else state.generation
        return (
            f"no member of generation {generation} has been connected for {self._restart_after:g} s: all of them are "
            "declared dead (--restart-after)"
        )


def _is_deserted(state: JobState, view: View) -> bool:
    """True if there is a line and no member of its last generation has a stream."""
    if view.base is None or state.forming is not None or state.finished is not None:
        return False
    return all(session.stream is None for session in state.present())


class Wakefulness:
    """Measures for how long the coordinator itself did not run, against a pulse that the shell promises to keep.

    The silence of a member counts only while the coordinator listened: a slow disk, a paused VM or a SIGSTOP would make
    every member look silent. `awake` is called each `pulse` seconds at least, while the loop is not stalled.
    """

    def __init__(self, now: float, pulse: float) -> None:
        self._last = now
        self.pulse = pulse

    def awake(self, now: float) -> float:
        """Notes that the coordinator runs; returns the seconds for which it did not run just before, 0 for none."""
        gap = now - self._last
        self._last = now
        return gap if gap > 2 * self.pulse else 0.0
