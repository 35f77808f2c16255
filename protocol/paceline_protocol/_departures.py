"""How members go, and what ends a view. Pure; the lowest of the three layers of a job's membership.

A member that goes is remembered by how it went, for as long as its view is the last one: a line is over only when all
its members are known to have ended. A view that is void is void for all of its members, by one verdict.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from paceline_protocol._barriers import Barriers
from paceline_protocol._events import Effect, EndSession, PushVerdict, StoreEnding, StoreVerdict
from paceline_protocol._job_state import JobState, Session, Standing
from paceline_protocol._refusals import SessionEnded
from paceline_protocol._silence import Leases, Stragglers
from paceline_protocol._values import Ending, ProtocolSettings, Verdict, View
from paceline_protocol._verdict import Evidence
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

    def __init__(self, state: JobState, settings: ProtocolSettings) -> None:
        self.state = state
        self._settings = settings
        self._leases = Leases(state)
        self._evidence = Evidence(state, settings)
        self._stragglers = Stragglers(state)
        self._barriers = Barriers(state.view, settings.max_open_barriers) if state.view else None
        self._gone_meanwhile: dict[str, Ending] = {}  # sessions that ended while a view with them was being stored

    def _lose(self, now: float, lost: list[tuple[Session, Ending]]) -> list[Effect]:
        """Ends sessions that are gone, each with how; voids the view if one was in it."""
        gone = {rank_of(session): ending for session, ending in lost if self._is_in_live_view(session)}
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

    def _is_in_live_view(self, session: Session) -> bool:
        """True also for a member that may go: it keeps the state together with others, who wait for it."""
        live = self.state.live
        going = session.standing is Standing.DISMISSED and live is not None and session.generation == live.generation
        return going or session.standing is Standing.IN_VIEW

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
            # In the next generation the same link would break again. The member at its end may be well: it comes back
            # when it has links to all.
            effects += self._part_with(verdict.culprits, "was cut off from others")
        return effects

    def _part_with(self, ranks: Collection[int], how: str) -> list[Effect]:
        """The line goes on without these members, unless none of the others may hold its state.

        Each may still be alive: it finds out that its session has ended, and comes back as a newcomer.
        """
        view = self.state.view
        if view is None or not self.state.is_elastic:
            return []
        parted, newcomers = set(ranks), set(view.newcomers)
        rest = [session for session in self.state.present() if session.rank not in parted]
        if not any(session.stream is not None and _may_lead(view, newcomers, session) for session in rest):
            return []
        effects: list[Effect] = []
        for rank in ranks:
            session = self.state.session_of(rank)
            if session is not None and session.generation == view.generation:
                ending = Ending(how, orderly=False, sure=False)
                refusal = SessionEnded(f"the session has ended: the member {ending.how}")
                effects += self._end(session, ending, refusal)
        return effects

    def _part_with_stragglers(self, now: float) -> list[Effect]:
        overdue, seconds = self._stragglers.overdue(now)
        return self._part_with([rank_of(session) for session in overdue], f"did not stop within {seconds:g} s")

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
            if session.standing is not Standing.DISMISSED:
                session.standing = Standing.VOID
            session.verdict = verdict
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


def _may_lead(view: View, newcomers: Collection[int], session: Session) -> bool:
    """True if the line can go on from what this member holds, as far as it has said what that is.

    A newcomer has yet to show that it has gone further; of others something may have spoiled the state.
    """
    met = session.met if session.has_met else None
    if met is not None and (met.tag is None or not (met.holds_base or view.base is None)):
        return False
    return view.base is None or session.rank not in newcomers or (met is not None and met.tag != view.base)
