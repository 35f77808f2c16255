"""Which members do not stop though their generation is over? Pure; part of a job's membership.

A member learns that its generation has failed at its next collective, so those that compute stop a little later, all
at about the same time. The clock therefore starts when half of the members have stopped; for members that a timeout is
blamed on, at once. A member that has not stopped `failure_timeout` later hangs, however well its session heartbeats: a
data loader that never returns, threads that died for want of memory. The others go on without it; if it wakes up, it
comes back as a new member.
"""

from __future__ import annotations

from paceline_server.leases import LOOK_AGAIN
from paceline_server.model import JobState, Session
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["Stragglers"]

_NEVER = float("inf")


class Stragglers:
    """Watches one job.

    Args:
        state: the job; only read.

    Attributes:
        due_at: when members that have not stopped by then are given up, infinity while nobody is waited for.
    """

    def __init__(self, state: JobState) -> None:
        self._state = state
        self.due_at = _NEVER
        self._looked = False

    def overdue(self, now: float) -> list[Session]:
        """The members that are given up now. To be asked after every event.

        Args:
            now: the time, in seconds.
        """
        view = self._state.view
        late: list[Session] = []
        over = self._state.verdict is not None and self._state.finished is None  # else members need not stop any more
        if view is not None and view.base is not None and over:
            present = self._state.present()
            late = [session for session in present if not session.has_met]
            if 2 * len(late) > len(present):
                late = [session for session in late if session.rank in self._timed_out()]
        if view is None or not late:
            self.due_at, self._looked = _NEVER, False
            return []
        timeout = view.settings.failure_timeout
        self.due_at = min(self.due_at, now + timeout)
        if now < self.due_at:
            return []
        if not self._looked:  # what they said may be in the inbox still, as for `leases`
            self.due_at, self._looked = now + LOOK_AGAIN, True
            return []
        self.due_at, self._looked = now + timeout, False  # should it turn out that nobody can go on without them
        return late

    def _timed_out(self) -> tuple[int, ...]:
        """The ranks that a verdict blames for a timeout: they have had the time that a step may take."""
        verdict = self._state.verdict
        timeout = verdict is not None and verdict.reason == ErrorReason.ERROR_REASON_TIMEOUT
        return verdict.culprits if verdict is not None and timeout else ()

    def renew_after_stall(self, slept: float) -> None:
        """The coordinator did not run for so many seconds: what the members said meanwhile is yet to be read."""
        if slept:
            self.due_at += slept
            self._looked = False
