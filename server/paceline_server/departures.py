"""How members go, and what ends a view. Pure; the lowest of the three layers of a job's membership.

A member that goes is remembered by how it went, for as long as its view is the last one: a line is over only when all
its members are known to have ended. A view that is void is void for all of its members, by one verdict.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from paceline_server.barriers import Barriers
from paceline_server.effects import Effect, EndSession, PushVerdict, StoreEnding, StoreVerdict
from paceline_server.errors import SessionEnded
from paceline_server.evidence import Evidence
from paceline_server.leases import Leases
from paceline_server.model import Ending, JobState, Session, Standing, Verdict
from paceline_server.settings import ServerSettings
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["Departures", "rank_of"]


class Departures:
    """The end of sessions and of views.

    Args:
        state: the job; owned by this object.
        settings: the coordinator's settings.

    Attributes:
        state: the job as it is; for reading.
    """

    def __init__(self, state: JobState, settings: ServerSettings) -> None:
        self.state = state
        self._settings = settings
        self._leases = Leases(state)
        self._evidence = Evidence(state, settings)
        self._barriers = Barriers(state.view, settings.max_open_barriers) if state.view else None
        self._gone_meanwhile: dict[str, Ending] = {}  # sessions that ended while a view with them was being stored

    def _lose(self, now: float, lost: list[tuple[Session, Ending]]) -> list[Effect]:
        """Ends sessions that are gone, each with how; voids the view if one was in it."""
        gone = {rank_of(session): ending for session, ending in lost if session.standing is Standing.IN_VIEW}
        effects: list[Effect] = []
        for rank, ending in gone.items():
            effects += self._mark(rank, ending)
        if gone:  # before the sessions end: a frozen member's stream still takes the verdict
            effects += self._void(now, self._evidence.judge(now, {rank: ending.how for rank, ending in gone.items()}))
        for session, ending in lost:
            if session.standing is Standing.WAITING and session.holds_a_part and not ending.sure:
                self.state.last_arrival = now  # it may be on its way back, like those whom a restart has cut off
            effects += self._end(session, ending, SessionEnded(f"the session has ended: the member {ending.how}"))
        return effects

    def _mark(self, rank: int, ending: Ending) -> list[Effect]:
        """Remembers how a member of the view went."""
        assert self.state.view is not None
        self.state.endings[rank] = ending
        return [StoreEnding(self.state.view.generation, rank, ending)]

    def _end(self, session: Session, ending: Ending, refusal: SessionEnded | None) -> list[Effect]:
        """Forgets a session; `refusal` is None for an orderly end."""
        del self.state.sessions[session.member_id]
        effects: list[Effect] = []
        view, rank = self.state.view, session.rank
        of_view = view is not None and session.generation == view.generation
        if of_view and rank is not None and rank not in self.state.endings:
            effects += self._mark(rank, replace(ending, orderly=False))
        if self.state.forming is not None:
            self._gone_meanwhile[session.member_id] = ending
        return [*effects, EndSession(session.member_id, refusal)]

    def _judge_if_ripe(self, now: float) -> list[Effect]:
        if not self._evidence.is_ripe(now):
            return []
        verdict = self._evidence.judge(now, {})
        effects = self._void(now, verdict)
        if verdict.reason == ErrorReason.ERROR_REASON_PEER_LOST:
            effects += self._part_with(verdict.culprits)
        return effects

    def _part_with(self, culprits: Collection[int]) -> list[Effect]:
        """Who is at the bad end of a link is out of the line: in the next generation that link would break again.

        It may be well, and comes back as a newcomer when it has links to all. Not if none but it may hold the state.
        """
        view = self.state.view
        if view is None or view.base is None:
            return []
        rest = [session for session in self.state.present() if session.rank not in culprits]
        if all(session.rank in view.newcomers or session.stream is None for session in rest):
            return []
        effects: list[Effect] = []
        for rank in culprits:
            session = self.state.session_of(rank)
            if session is not None and session.generation == view.generation:
                ending = Ending("was cut off from others", orderly=False, sure=False)
                refusal = SessionEnded(f"the session has ended: the member {ending.how}")
                effects += self._end(session, ending, refusal)
        return effects

    def _void(self, now: float, verdict: Verdict) -> list[Effect]:
        """The view is over; every member of it is told the same, now or when it resumes."""
        view = self.state.live
        assert view is not None, "one verdict for each generation"
        self.state.verdict = verdict
        if len(self.state.endings) < len(view.seats):
            self.state.last_parting = now
        self._evidence.clear()
        effects: list[Effect] = [StoreVerdict(verdict)]
        assert self._barriers is not None
        effects += self._barriers.fail_all(verdict)
        for seat in view.seats:
            session = self.state.sessions.get(seat.member_id)
            if session is None:
                continue
            session.standing, session.verdict = Standing.VOID, verdict
            if session.lease_from is None:  # not seen since a restart: from now on nobody vouches for it
                session.lease_from = session.heard
                self._leases.began(session)
            if session.stream is not None:
                effects.append(PushVerdict(session.member_id, verdict))
        return effects


def rank_of(session: Session) -> int:
    """The rank of a member of a view."""
    assert session.rank is not None, "a member of a view has a rank"
    return session.rank
