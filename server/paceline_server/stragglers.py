"""Which members do not stop though their generation is over? Pure; part of a job's membership.

A member learns that its generation has failed at its next collective, so those that compute stop a little later, all
at about the same time. Two clocks run:

- When half of the members of a line have stopped, the rest have `failure_timeout`; so have, at once, members that a
  timeout is blamed on. Who has not stopped by then hangs, however well its session heartbeats: a data loader that never
  returns, threads that died for want of memory.
- When one has stopped, all the others have its `step_timeout`, for a step may last that long: most of them may hang
  together, at a dead disk. Before the first step of a line this is the only clock: members load data and models. So it
  is while no failure is known: a member may evaluate between two steps, or this coordinator has forgotten the verdict
  that it was killed over.

The others go on without a member that has had its time; if it wakes up, it comes back as a new member.
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
    """

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._few = _Clock()
        self._all = _Clock()

    @property
    def due_at(self) -> float:
        """When members that have not stopped by then are given up, infinity while nobody is waited for."""
        return min(self._few.at, self._all.at)

    def overdue(self, now: float) -> tuple[list[Session], float]:
        """The members that are given up now, and the seconds that they had. To be asked after every event.

        Args:
            now: the time, in seconds.
        """
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
        if state.view is None or state.finished is not None or not state.is_elastic:  # those of a job that is done go
            return [], []
        if state.verdict is None and state.view.base is None:  # some are still at what comes before the steps
            return [], []
        late: list[Session] = []
        stopped: list[Session] = []
        for session in state.present():
            (stopped if session.has_met else late).append(session)
        return late, stopped

    def _few_of(self, late: list[Session], stopped: list[Session]) -> list[Session]:
        """Those of the late ones that have `failure_timeout` only."""
        view, verdict = self._state.view, self._state.verdict
        if view is None or verdict is None:
            return []
        if view.base is not None and len(late) <= len(stopped):
            return late
        if verdict.reason != ErrorReason.ERROR_REASON_TIMEOUT:
            return []
        return [session for session in late if session.rank in verdict.culprits]  # they have had the time of a step

    def renew_after_stall(self, slept: float) -> None:
        """The coordinator did not run for so many seconds: what the members said meanwhile is yet to be read."""
        if slept:
            for clock in (self._few, self._all):
                clock.renew(slept)


class _Clock:
    """Rings once somebody has been waited for too long.

    It looks twice: what they said may be in the inbox still, as for `leases`.

    Attributes:
        at: when it is to be looked at.
    """

    def __init__(self) -> None:
        self.at = _NEVER
        self._looked = False

    def rings(self, now: float, timeout: float | None) -> bool:
        """Whether time is up; None for a timeout stops the clock, and any other starts it unless it runs."""
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
        """What ran meanwhile does not count."""
        self.at += slept
        self._looked = False
