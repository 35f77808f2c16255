"""How members go, and what ends a view.

A member that goes is remembered by how it went, for as long as its view is the last one: a line is over only when all
its members are known to have ended. A view that is void is void for all of its members, by one verdict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace

from paceline_protocol._barriers import Barriers
from paceline_protocol._breaches import Breaches
from paceline_protocol._events import Effect, EndSession, Send, StoreEnding, StoreVerdict
from paceline_protocol._job_state import JobState, Session, Standing
from paceline_protocol._orders import seat_of
from paceline_protocol._refusals import ReplicaLost, SessionEnded
from paceline_protocol._replicas import told
from paceline_protocol._silence import Leases, Stragglers
from paceline_protocol._values import Ending, Process, ProtocolSettings, Verdict, View
from paceline_protocol._verdict import Evidence
from pacelinepb.v1.errors_pb2 import ErrorReason

_MOST_BROKEN = 1_000
"""Replicas without a rank that are remembered, for mates that were away when it ended."""


class Departures:
    """Ends sessions and views. `gone_meanwhile` is how sessions ended while a view with them was being stored."""

    def __init__(self, state: JobState, settings: ProtocolSettings) -> None:
        self._state = state
        self.leases = Leases(state, settings.max_silence)
        self.evidence = Evidence(state, settings)
        self.breaches = Breaches(state)
        self.stragglers = Stragglers(state)
        self.barriers = Barriers(state.view, settings.max_open_barriers)
        self.gone_meanwhile: dict[str, Ending] = {}
        self._unexplained: frozenset[frozenset[int]] = frozenset()  # broken links of the void view, as pairs of ranks
        self._ended: dict[tuple[str, int], tuple[str, Ending]] = {}  # ranks of replicas that have: what each is called
        self._broken: OrderedDict[str, str] = OrderedDict()  # replicas without a rank, the latest of them, and why
        for rank, ending in state.endings.items():
            self._note_rank(rank, ending)
        # Which of these live was not stored: they have time to come back.
        self._stored = frozenset(self._ended)
        self._patient_until = state.restored_at + (state.view.settings.failure_timeout if state.view is not None else 0)

    def lose(self, now: float, lost: list[tuple[Session, Ending]]) -> list[Effect]:
        """Ends the sessions of members that are gone, each with how it went; voids the view if one was in it."""
        gone = {rank_of(session): ending for session, ending in lost if self._is_in_live_view(session)}
        effects: list[Effect] = []
        for rank, ending in gone.items():
            effects += self.mark(rank, ending)
        if gone:  # before the sessions end: a frozen member's stream still takes the verdict
            effects += self.void(now, self.evidence.judge(now, {rank: ending.how for rank, ending in gone.items()}))
        for session, ending in lost:
            if session.standing is Standing.CANDIDATE and session.holds_a_part and not ending.sure:
                self._state.last_arrival = now  # it may be on its way back, like those whom a restart has cut off
            effects += self.end(session, ending, SessionEnded(f"the session has ended: the member {ending.how}"))
        return effects + (self.part_with_breakers() if gone else [])

    def _is_in_live_view(self, session: Session) -> bool:
        """True also for a member that may go: others may wait for it to write the last checkpoint with them."""
        live = self._state.live
        going = session.standing is Standing.DISMISSED and live is not None and session.generation == live.generation
        return going or session.standing is Standing.IN_VIEW

    def mark(self, rank: int, ending: Ending) -> list[Effect]:
        """Remembers how a member of the view went."""
        assert self._state.view is not None
        self._state.endings[rank] = ending
        self._note_rank(rank, ending)
        return [StoreEnding(self._state.view.generation, rank, ending)]

    def end(self, session: Session, ending: Ending, refusal: SessionEnded | ReplicaLost | None) -> list[Effect]:
        """Forgets a session; `refusal` is None for an orderly end."""
        del self._state.sessions[session.member_id]
        effects: list[Effect] = []
        view, rank = self._state.view, session.rank
        of_view = view is not None and session.generation == view.generation
        if session.replica and not ending.sure:
            seat = view.seats[rank] if of_view and view is not None and rank is not None else seat_of(session)
            self._state.astray[session.replica, session.position] = seat
        elif session.replica and not of_view and not ending.lives:
            name = f"{session.process.host} (pid {session.process.pid})"
            self._ended[session.replica, session.position] = name, replace(ending, orderly=False)
        if of_view and rank is not None and rank not in self._state.endings:
            effects += self.mark(rank, replace(ending, orderly=False))
        if self._state.forming is not None:
            self.gone_meanwhile[session.member_id] = ending
        return [*effects, EndSession(session.member_id, refusal)]

    def _note_rank(self, rank: int, ending: Ending) -> None:
        """Notes that a process of the view has surely ended, if it was a rank of a replica."""
        assert self._state.view is not None
        seat = self._state.view.seats[rank]
        if seat.replica and ending.sure and not ending.lives:
            self._ended[seat.replica, rank % seat.replica_size] = seat.label, ending

    def find_astray(self, process: Process, ending: Ending) -> None:
        """Notes that a process has ended, if mates wait for it that are in the last view no more."""
        for (replica, position), seat in self._state.astray.items():
            if seat.process.is_same(process):
                name = seat.label if seat.replica else f"{seat.process.host} (pid {seat.process.pid})"
                self._ended.setdefault((replica, position), (name, ending))

    def check_replica(self, replica: str) -> None:
        """Refuses a rank that comes back to a replica which has lost another one meanwhile."""
        if replica in self._broken:
            raise ReplicaLost(self._broken[replica])

    def end_mates(self, now: float) -> list[Effect]:
        """Ends the sessions of ranks whose replica has lost one for good: their process groups cannot be mended.

        A rank that is only silent may come back, and a process whose session was replaced is there. A rank that has
        left in good order is missed once its view is void, or a mate has stopped to wait for others. Until then its
        mates may be about to leave too.
        """
        effects: list[Effect] = []
        for (replica, position), (label, ending) in list(self._ended.items()):
            mates = self._state.sessions.of_replica(replica)
            back = any(mate.position == position for mate in mates)
            may_come = now < self._patient_until and (replica, position) in self._stored
            waits = any(mate.has_met for mate in mates)  # for others, and not on its way out
            may_follow = mates and ending.orderly and self._state.verdict is None and not waits
            if not back and (may_come or may_follow):
                continue
            del self._ended[replica, position]
            if back or self._state.finished is not None:
                continue
            text = self._broken.setdefault(replica, f"{label}, a rank of this worker's replica, {ending.how}")
            if len(self._broken) > _MOST_BROKEN:
                self._broken.popitem(last=False)
            lost = ReplicaLost(text)
            for mate in mates:
                if mate.standing is not Standing.DISMISSED:
                    effects += self.end(mate, Ending(f"ended with {label}", orderly=False), lost)
        for replica, position in list(self._state.astray):
            mates = self._state.sessions.of_replica(replica)
            if not mates or any(mate.position == position for mate in mates):
                del self._state.astray[replica, position]
        return effects

    def judge_if_ripe(self, now: float) -> list[Effect]:
        if not self.evidence.is_ripe(now):
            return []
        verdict = self.evidence.judge(now, {})
        effects = self.void(now, verdict)
        if verdict.reason == ErrorReason.ERROR_REASON_PEER_LOST:
            # In the next generation the same link would break again. The member at its end may be well: it comes back
            # when it has links to all.
            effects += self.evict(verdict.culprits, "was cut off from others")
        return effects + self.part_with_breakers()

    def second_death(self, session: Session) -> list[Effect]:
        """Evicts a member whose stream ends after the verdict, if a broken link of it was left unexplained.

        When several die at once, news of one of them may come a little later.
        """
        view, rank = self._state.view, session.rank
        if view is None or session.generation != view.generation or session.standing is not Standing.VOID:
            return []
        others = [self._state.session_of(end) for edge in self._unexplained if rank in edge for end in edge - {rank}]
        if rank is None or not any(other is not None and other.stream is not None for other in others):
            return []
        return self.evict([rank], "was cut off from others")

    def part_with_breakers(self) -> list[Effect]:
        """Ends the sessions of members that the last view parts with over a breach of the protocol."""
        view, verdict = self._state.view, self._state.verdict
        if view is None or verdict is None or verdict.reason != ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL:
            return []
        effects: list[Effect] = []
        for rank, how in self.breaches.due().items():
            session = self._state.session_of(rank)
            if session is not None and self._can_do_without([rank]):
                barred = self.breaches.part(session.process, how)
                effects += self._part(session, Ending(how, orderly=False, sure=barred))
        return effects

    def evict(self, ranks: Collection[int], how: str) -> list[Effect]:
        """Ends the sessions of these members, unless none of the others may hold the line's state.

        Each may still be alive: it finds out that its session has ended, and comes back as a newcomer.
        """
        if not self._can_do_without(ranks):
            return []
        effects: list[Effect] = []
        for rank in ranks:
            session = self._state.session_of(rank)
            if session is not None:
                effects += self._part(session, Ending(how, orderly=False, sure=False))
        return effects

    def _can_do_without(self, ranks: Collection[int]) -> bool:
        """True if one of the other members may hold the line's state."""
        view = self._state.view
        if view is None or not self._state.is_elastic:
            return False
        size, newcomers = view.settings.replica_size, set(view.newcomers)
        parted = {rank // size for rank in ranks}
        rest = (s for s in self._state.present() if s.rank is not None and s.rank // size not in parted)
        return any(session.stream is not None and _may_lead(view, newcomers, session) for session in rest)

    def _part(self, session: Session, ending: Ending) -> list[Effect]:
        """Ends the session of a member of the last view, which may be alive."""
        view = self._state.view
        if view is None or session.generation != view.generation:
            return []
        return self.end(session, ending, SessionEnded(f"the session has ended: the member {ending.how}"))

    def evict_stragglers(self, now: float) -> list[Effect]:
        overdue, seconds = self.stragglers.overdue(now)
        return self.evict([rank_of(session) for session in overdue], f"did not stop within {seconds:g} s")

    def void(self, now: float, verdict: Verdict) -> list[Effect]:
        """Ends the view. Every member is told the same verdict, now or when it resumes."""
        view = self._state.live
        assert view is not None, "one verdict for each generation"
        self._state.verdict = verdict
        if len(self._state.endings) < len(view.seats):
            self._state.last_parting = now
        if verdict.reason == ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL:
            self.breaches.hear(self.evidence.breaches())
        self._unexplained = self.evidence.unexplained(verdict)
        self.evidence.clear()
        heard = told(verdict, view.settings)
        effects: list[Effect] = [StoreVerdict(verdict)]
        effects += self.barriers.fail_all(heard)
        for seat in view.seats:
            session = self._state.sessions.get(seat.member_id)
            if session is None:
                continue
            if session.standing is not Standing.DISMISSED:
                session.standing = Standing.VOID
            session.verdict = heard
            if session.lease_from is None:  # not seen since a restart: from now on nobody vouches for it
                session.lease_from = session.heard
                self.leases.began(session)
            if session.stream is not None:
                effects.append(Send(session.member_id, heard))
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
