"""Gives out the places of a coordinator's sessions.

A session holds a place from its registration to its end, also while it has no stream. A payer of sessions is the jobs
of the caller's token, or else the session's job alone, with the job of its launchers in both cases. It may hold at most
as many places as it leaves free (`limits.Budget`). Who has paid first pays to the end: a session that is resumed, or
replaced by its member's next one, moves no place to somebody else.

A coordinator that starts again does not know who has paid for the sessions that it restores. Their own jobs pay.
"""

from __future__ import annotations

from paceline_server.errors import LimitMet
from paceline_server.limits import Budget, in_words
from paceline_server.security.tokens import run_of
from paceline_server.settings import ServerSettings


class SessionPlaces:
    """The places of all sessions."""

    def __init__(self, settings: ServerSettings) -> None:
        self.budget = Budget(settings.max_sessions)
        self._most_of_job = settings.max_job_sessions
        self._held: dict[str, tuple[str, str]] = {}  # by member: who pays, and the session's job

    def __len__(self) -> int:
        return len(self._held)

    def payer_of(self, job: str, token_jobs: frozenset[str] | None, former: str = "") -> str:
        """Returns who pays for a session of this job, in words; `former` is the member whose session it replaces."""
        return self._held[former][0] if former in self._held else in_words(token_jobs or {run_of(job)})

    def check(self, payer: str, job: str, held: int) -> None:
        """Checks that there is room for one more session, besides the `held` ones that the job has."""
        if held >= self._most_of_job:
            raise LimitMet(f"job {job!r} has {self._most_of_job} sessions, the most that one job may have")
        if not self.budget.has_room(payer, 1):
            used, total = self.budget.used, self.budget.total
            raise LimitMet(
                f"{payer} has {self.budget.held(payer)} sessions, and all jobs have {used} of {total}: one token, or "
                "one job, may have at most as many as are then left free; let some of them end, or give some jobs a "
                "coordinator of their own"
            )

    def take(self, member_id: str, payer: str, job: str) -> None:
        """Notes that a session of a job holds a place."""
        self._held[member_id] = payer, job
        self.budget.add(payer, 1)

    def free(self, member_id: str) -> None:
        """Notes that a session has ended; it may have been noted already."""
        if (held := self._held.pop(member_id, None)) is not None:
            self.budget.add(held[0], -1)

    def free_job(self, job: str) -> None:
        """Notes that all sessions of a job have ended."""
        for member_id in [each for each, (_, name) in self._held.items() if name == job]:
            self.free(member_id)
