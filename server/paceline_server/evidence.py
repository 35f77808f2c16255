"""The reports about one generation, gathered until they are judged. Pure; part of a job's membership.

`verdict` weighs them; this says when. Reports gather for a moment because one death makes several, and the one that
names the cause may come second. A second witness ends the wait; a broken link between two members that both seem well
prolongs it, for the news of a death may be on its way.
"""

from __future__ import annotations

from paceline_server import verdict
from paceline_server.model import JobState, Report, Verdict
from paceline_server.settings import ServerSettings
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["Evidence"]

_NEVER = float("inf")
_REPORTS_PER_MEMBER = 4
"""More reports than this times the number of members say nothing new; memory stays bounded."""


class Evidence:
    """What is held against members of the live view.

    Args:
        state: the job.
        settings: for how long to gather.
    """

    def __init__(self, state: JobState, settings: ServerSettings) -> None:
        self._state = state
        self._settings = settings
        self._reports: list[Report] = []
        self._first_at = _NEVER
        self.judge_at = _NEVER

    def add(self, now: float, report: Report) -> None:
        """Takes a report in."""
        view = self._state.live
        assert view is not None, "reports are about the live view"
        if len(self._reports) >= _REPORTS_PER_MEMBER * len(view.seats):
            return
        if not self._reports:
            self._first_at, self.judge_at = now, now + self._settings.gather_time
        self._reports.append(report)

    def is_ripe(self, now: float) -> bool:
        """True when the verdict is due; moves `judge_at` on when it is better to wait a little longer."""
        if not self._reports:
            return False
        view = self._state.live
        assert view is not None
        if verdict.has_second_witness(self._case({})):
            return True
        if len({report.reporter for report in self._reports}) >= len(view.seats) - len(self._state.endings):
            return True
        if now < self.judge_at:
            return False
        doubtful = all(report.reason == ErrorReason.ERROR_REASON_PEER_LOST for report in self._reports)
        if doubtful and now < self._first_at + self._settings.doubt_time:
            self.judge_at = self._first_at + self._settings.doubt_time
            return False
        return True

    def judge(self, now: float, gone: dict[int, str]) -> Verdict:
        """The verdict on what is known now.

        Args:
            now: the time, in seconds.
            gone: ranks that are surely gone, each with how.
        """
        return verdict.judge(now, self._case(gone))

    def clear(self) -> None:
        """The view is over: nothing is held against anybody."""
        self._reports = []
        self._first_at = self.judge_at = _NEVER

    def _case(self, gone: dict[int, str]) -> verdict.Case:
        view = self._state.view
        assert view is not None
        sessions = [(seat.rank, self._state.sessions.get(seat.member_id)) for seat in view.seats]
        return verdict.Case(
            view=view,
            reports=tuple(self._reports),
            gone=gone,
            left={rank for rank, ending in self._state.endings.items() if ending.orderly},
            # Not seen since a restart is suspect too: there is no stream.
            suspects={rank for rank, session in sessions if session is not None and session.stream is None},
            progress={rank: session.progress for rank, session in sessions if session is not None},
        )
