"""Who has been silent for too long? Pure; part of a job's membership.

A member's lease runs from its last message, from its stream's end, or from the end of a stall of the coordinator.
A lapse counts only at the second of two looks: between them the shell takes in what was in its inbox, so that a message
that had arrived is never mistaken for silence.
"""

from __future__ import annotations

from paceline_server.model import JobState, Session, Standing

__all__ = ["Leases", "LOOK_AGAIN"]

LOOK_AGAIN = 0.02
"""Seconds between the look that finds a lease lapsed and the look that believes it: some rounds of the event loop."""


_CANDIDATE_S = 10.0
"""For how long at most a candidate that has lost its stream keeps its place, unless it holds a part of a state that
others may wait for. `failure_timeout` is its own to say: a day of it must not keep the places of others."""

_OF_VIEW = (Standing.IN_VIEW, Standing.VOID)


class Leases:
    """The leases of a job's sessions.

    Args:
        state: the job; `lease_from` and `overdue_from` of its sessions are read and written here.
    """

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._unseen_from: float | None = None
        self._unseen = any(session.lease_from is None for session in state.sessions.values())
        self._nobody_at = float("-inf")  # when last nobody of the line was heard
        # Heartbeats only move leases on, so a look may come early but never late: no heartbeat has to touch this.
        self.check_at = float("-inf") if state.sessions else float("inf")

    def began(self, session: Session) -> None:
        """A lease begins anew for another reason than a heartbeat."""
        assert session.lease_from is not None
        self.check_at = min(self.check_at, session.lease_from + _lease(session))

    def renew_after_stall(self, now: float, slept: float) -> None:
        """Lets all leases start anew if the coordinator slept for longer than their heartbeat interval."""
        for session in self._state.sessions.values() if slept else ():
            if slept > session.settings.heartbeat_interval:
                session.overdue_from = None
                if session.lease_from is not None:
                    session.lease_from = now
                else:
                    self._unseen_from = now

    def lapsed(self, now: float) -> list[tuple[Session, str]]:
        """Sessions to end for silence, each with how it went; the caller ends them all."""
        if now < self.check_at:
            return []
        self.check_at = float("inf")
        lapsed: list[tuple[Session, str]] = []
        unseen: list[Session] = []
        vouched = somebody = False
        for session in self._state.sessions.values():
            if session.lease_from is None:
                unseen.append(session)
                continue
            lease_from = session.lease_from
            if session.standing is Standing.IN_VIEW and not session.has_met:
                lease_from = max(lease_from, self._state.vouched_at)
            if self._has_lapsed(now, session, lease_from):
                lapsed.append((session, _how(now, session)))
            else:
                vouched |= session.standing is Standing.IN_VIEW
                recently = now - session.heard < 2 * session.settings.heartbeat_interval
                somebody |= session.standing in _OF_VIEW and session.stream is not None and recently
        lapsed += self._lapsed_unseen(now, unseen, vouched)
        if self._state.view is None or self._state.view.base is None:
            return lapsed
        if not somebody:
            self._nobody_at = now
        # While nobody of a line is heard it is this coordinator that is cut off, perhaps, and they train on: to evict
        # them would help nobody (I2). And who is heard first after that shall not be alone: the others have their time.
        due = [(s, how) for s, how in lapsed if s.standing not in _OF_VIEW or now >= self._nobody_at + _timeout(s)]
        if len(due) < len(lapsed):
            self.check_at = min(self.check_at, now + lapsed[0][0].settings.heartbeat_interval)
        return due

    def count_unseen(self, now: float) -> None:
        """From now on nobody vouches for members that have not been seen since the restart."""
        for session in self._state.sessions.values() if self._unseen else ():
            if session.lease_from is None:
                session.lease_from = now
                self.began(session)
        self._unseen = False

    def whereabouts(self, now: float, rank: int) -> str:
        """When a member of the view was last seen, for a list of who is missing."""
        session = self._state.session_of(rank)
        if session is None:
            return "gone"
        if session.lease_from is None:
            return "not seen since the coordinator was started again"
        if session.stream_ended is not None:
            return f"disconnected {now - session.stream_ended:.1f} s ago"
        return f"last heard {now - session.heard:.1f} s ago"

    def _has_lapsed(self, now: float, session: Session, lease_from: float) -> bool:
        due = lease_from + _lease(session)
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

    def _lapsed_unseen(self, now: float, unseen: list[Session], vouched: bool) -> list[tuple[Session, str]]:
        """Members of a stored view that nobody has seen since the restart.

        As long as one member of the view is there, it vouches for them: it would report the end of its links. With
        nobody there to vouch, all of them together have `failure_timeout` to come back.
        """
        if vouched or not unseen:
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
    if session.standing is not Standing.WAITING or session.stream is not None or session.holds_a_part:
        return timeout
    return min(timeout, _CANDIDATE_S)


def _how(now: float, session: Session) -> str:
    if session.stream_ended is not None:
        return f"lost its session and did not come back for {now - session.stream_ended:.1f} s"
    return f"was silent for {now - session.heard:.1f} s"


def _timeout(session: Session) -> float:
    return session.settings.failure_timeout
