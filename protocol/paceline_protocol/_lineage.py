"""The life of a line: its views form, its members meet, it is drained, finished, begun anew. Pure.

The middle layer of a job's membership. Whatever may change the policy's mind ends in `_reconsider`, which asks `policy`
again and does what it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline_protocol._barriers import Barriers
from paceline_protocol._departures import Departures, rank_of
from paceline_protocol._events import (
    DrainAsked,
    Effect,
    FinishedLine,
    FinishStored,
    ForgetView,
    MetOthers,
    PushDismissed,
    PushDrain,
    PushFinished,
    PushSpare,
    PushStateLost,
    PushView,
    StoreFailed,
    StoreFinished,
    StoreReached,
    StoreView,
)
from paceline_protocol._job_state import JobState, Session, Standing
from paceline_protocol._meeting import Awaited, Meeting, what_is_lost
from paceline_protocol._orders import Announcer, Orders
from paceline_protocol._policy import Decision, decide
from paceline_protocol._refusals import BadRequest, SessionEnded
from paceline_protocol._values import Ending, Meet, Progress, ProtocolSettings, Seat, Verdict, View
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["Line"]

_NEVER = float("inf")
_STORE_RETRY = 1.0
"""Seconds before a view that could not be stored is tried again, under a new number."""


class Line(Departures):
    """The chain of a job's generations.

    Args:
        state: the job; owned by this object.
        settings: the coordinator's settings.

    Attributes:
        decision: the policy's last word, with its sentence.
        waits_since: since when there are workers and no view that goes on; None while there is one, or nobody.
    """

    def __init__(self, state: JobState, settings: ProtocolSettings) -> None:
        super().__init__(state, settings)
        self._announcer = Announcer(settings.announce_interval)
        self._retry_at = _NEVER
        self._orders = Orders(state)
        self._awaited: Awaited | None = None  # of the meeting that is on, while only these keep it from going on
        self.decision = decide(-_NEVER, state, settings.settle_time)
        self.waits_since: float | None = None

    def _meet(self, now: float, event: MetOthers) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None or session.standing is Standing.DISMISSED:
            return []
        session.heard = session.lease_from = now
        if self.state.finished is not None:
            return [PushFinished(session.member_id, self.state.finished)]
        met, view = event.met, self.state.view
        if met.generation > session.last_generation:
            raise BadRequest(f"a meeting after generation {met.generation}, which the member is not in")
        if met.generation < session.generation:
            return []  # said before it heard of its new view
        if session.standing is not Standing.WAITING and (view is None or view.generation != session.generation):
            # Its view was forgotten, for it had no state yet: now it is as any other newcomer.
            self._become_candidate(now, session)
        # What is brought may be from a disk, and another coordinator's: tags of this line must not be the same (I3).
        tags = [tag.generation for tag in (met.tag, met.prepared) if tag is not None]
        self.state.generation = max(self.state.generation, *tags, 0)
        before = session.met
        session.met = replace(met, generation=session.generation, holds_base=met.holds_base and session.generation > 0)
        session.catching_up = False
        self._orders.forget(session)
        if session.generation:
            self._leases.count_unseen(now)  # at a change of view nobody vouches for who is not there
        effects = self._cross_off(now, session, before)
        return self._reconsider(now) if effects is None else effects

    def _finish(self, now: float, event: FinishedLine) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None:
            return []
        session.heard = session.lease_from = now
        if self.state.finished is not None:
            return [PushFinished(session.member_id, self.state.finished)]
        if event.generation != session.generation or self.state.view is None or self.state.view.base is None:
            return []
        if self.state.finishing is not None:
            return []
        self.state.finishing = event.step
        return [StoreFinished(event.step)]

    def _finish_stored(self, now: float, event: FinishStored) -> list[Effect]:
        if self.state.finishing != event.step:
            return []
        self.state.finishing, self.state.finished = None, event.step
        effects: list[Effect] = [PushFinished(member_id, event.step) for member_id in self.state.sessions]
        return effects + self._reconsider(now)

    def _drain(self, now: float, event: DrainAsked) -> list[Effect]:
        effects: list[Effect] = []
        for member_id in event.member_ids:
            if (session := self.state.sessions.get(member_id)) is not None:
                session.draining = event.reason
                effects.append(PushDrain(member_id, event.reason))
        return effects + self._reconsider(now)

    def _restart(self, now: float) -> list[Effect]:
        """The operator's word counts as each member's own."""
        effects: list[Effect] = []
        if self.state.finished is not None or self.state.finishing is not None:
            self.state.finished = self.state.finishing = None
            effects.append(StoreFinished(None))
        ending = Ending("was taken for dead by the operator (paceline restart)", orderly=False)
        view = self.state.view
        if view is not None:
            effects += self._lose(now, [(session, ending) for session in self.state.present()])
            for rank, known in list(self.state.endings.items()):
                if not known.sure:
                    effects += self._mark(rank, ending)
        return effects + self._reconsider(now)

    # Views ------------------------------------------------------------------------------------------------------------

    def _reconsider(self, now: float, newcomer: Session | None = None) -> list[Effect]:
        """Asks the policy again; every event that may change its mind ends here."""
        self._awaited = None
        effects = self._part_with_stragglers(now)
        view = self.state.view
        if view is not None and self._line_is_over(view):
            effects += self._forget_view(view)
        effects += self._let_candidates_go(now)
        self.decision = decide(now, self.state, self._settings.settle_time)
        meeting = self.decision.meeting
        if meeting is not None and meeting.over:
            effects += self._begin_anew(now, meeting)
            self.decision = decide(now, self.state, self._settings.settle_time)
            meeting = self.decision.meeting
        if self.decision.members is not None or self.state.live is not None or not self.state.sessions:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now
        if self.decision.members is not None:
            return effects + self._form(self.decision.members, meeting)
        if self.state.forming is not None:  # the view will say more
            return effects
        effects += self._orders.give(self.decision)
        if meeting is not None and meeting.dismissed:
            effects += self._dismiss(now, meeting.dismissed)
        if view is not None and meeting is not None and meeting.wording:
            self._awaited = Awaited(view, meeting, len(self.state.present()))
        return effects + self._announcer.announce(now, self.decision.reason, self._who_wait(), newcomer)

    def _cross_off(self, now: float, session: Session, before: Meet | None) -> list[Effect] | None:
        """What follows if others are waited for as much as before; None if the policy is to be asked again."""
        awaited = self._awaited
        if awaited is None or now >= self._stragglers.due_at:
            return None
        reason = awaited.cross_off(session, before)
        if reason is None:
            return None
        meeting = awaited.meeting
        self.decision = Decision(None, reason, meeting=meeting)
        effects = self._orders.give_one(session, meeting if session in awaited else None)
        if now < self._announcer.announce_at < _NEVER:  # the next round tells this, too
            return effects
        return effects + self._announcer.announce(now, reason, self._who_wait(), None)

    def _line_is_over(self, view: View) -> bool:
        """True if all members have gone, and their view had no base yet or the job is done."""
        endings = self.state.endings
        if len(endings) < len(view.seats):
            return False
        is_done = self.state.finished is not None and all(ending.sure for ending in endings.values())
        return view.base is None or is_done

    def _who_wait(self) -> Iterator[Session]:
        yield from self.state.candidates()
        for seat in self.state.view.seats if self.state.view is not None else ():
            session = self.state.sessions.get(seat.member_id)
            if session is None or session.stream is None:
                continue
            if self.state.is_present(session) and session.has_met:
                yield session

    def _forget_view(self, view: View) -> list[Effect]:
        self.state.view, self.state.verdict, self.state.restored, self._barriers = None, None, False, None
        self.state.endings.clear()
        self._evidence.clear()
        reached = [] if self.state.reached is None else [StoreReached(self.state.reached)]
        return [*reached, ForgetView(view.generation)]

    def _show(self, now: float, generation: int, failure_timeout: float) -> list[Effect]:
        """A worker was in this generation. If it is news, the coordinator's state is lost, or an older copy of it.

        Then a stored view says nothing about the line any more: its members, and those that the coordinator has never
        heard of, come back as new ones, each with the state that it holds.
        """
        view = self.state.view
        # Its number counts, and not the job's: that may be above it for a tag which somebody found on a disk.
        is_old = view is not None and self.state.restored and generation > view.generation
        if generation <= self.state.generation and not is_old:
            return []
        self.state.generation = max(self.state.generation, generation)
        self.state.patient_until = now + failure_timeout
        if view is None or not is_old:
            return []
        text = f"the stored state of job {self.state.name!r} is old: it knows nothing of generation {generation}"
        effects: list[Effect] = []
        for session in [s for s in self.state.sessions.values() if s.generation == view.generation]:
            effects += self._end(
                session, Ending("belongs to an old copy of the state", orderly=False), SessionEnded(text)
            )
        if self.state.forming is not None:
            effects.append(ForgetView(self.state.forming.generation))
            self.state.forming = None
        return effects + self._forget_view(view)

    def _trust_stored_view(self) -> None:
        """If all members of the stored view are here, and in that generation, no later one of their line exists.

        A worker that shows a greater number is of another line then, and shall not end this one.
        """
        if self.state.restored and self.state.view is not None:
            sessions = (self.state.sessions.get(seat.member_id) for seat in self.state.view.seats)
            self.state.restored = any(session is None or session.stream is None for session in sessions)

    def _begin_anew(self, now: float, meeting: Meeting) -> list[Effect]:
        """The line is over: its last members are newcomers to the next, but for those that hold nothing.

        Those whose shares are of no use any more begin from what they find on a disk, and so do candidates.
        """
        view = self.state.view
        assert view is not None
        effects: list[Effect] = []
        present = self.state.present()
        lost = set(meeting.lost)
        for session in meeting.lost:
            self._become_candidate(now, session)
            effects.append(PushStateLost(session.member_id, meeting.reason))
        for session in (session for session in present if session not in lost):
            assert session.met is not None
            if session.met.tag is None:
                text = (
                    "all who held the state of the job have ended, and this worker's own was not whole: start it again"
                )
                effects += self._end(session, Ending("held no state", orderly=False), SessionEnded(text))
                continue
            met = replace(session.met, generation=0, holds_base=False)
            self._become_candidate(now, session)
            session.met = met
        return effects + self._forget_view(view)

    def _become_candidate(self, now: float, session: Session) -> None:
        """A member is in no view any more, and has yet to say what it holds."""
        session.standing, session.generation, session.rank = Standing.WAITING, 0, None
        session.verdict, session.met, session.told_to_meet, session.catching_up = None, None, None, False
        session.promised = None
        self.state.last_arrival = now

    def _let_candidates_go(self, now: float) -> list[Effect]:
        """Dismisses candidates that want to leave while a line runs, since the line does not need their state."""
        live = self.state.live
        if live is None or live.base is None or self.state.forming is not None:
            return []
        leaving = tuple(s for s in self.state.bringing() if s.met is not None and s.met.leaving)
        if not leaving or any(session.has_met for session in self.state.present()):
            return []
        return self._dismiss(now, leaving)

    def _dismiss(self, now: float, sessions: tuple[Session, ...]) -> list[Effect]:
        live = self.state.live
        there = self.state.sessions.values()
        gone = [s for s in there if s.standing is Standing.DISMISSED and live and s.generation == live.generation]
        for session in sessions:
            session.standing = Standing.DISMISSED
        told = [self._may_go(session) for session in sessions]
        effects: list[Effect] = []
        if gone and live is not None and any(order.last for order in told):
            # Who was let go before keeps nothing, and may be there for long: the last ones shall not wait for it.
            ranks = tuple(sorted(rank_of(session) for session in gone))
            text = f"{', '.join(live.seats[rank].short_label for rank in ranks)} left before the others"
            effects += self._void(now, Verdict(live.generation, ErrorReason.ERROR_REASON_PEER_LOST, ranks, 0, text))
        return [*effects, *told]

    def _may_go(self, session: Session) -> PushDismissed:
        """A member that goes; if nobody stays, all who go keep the state, in a collective."""
        view = self.state.view
        last = view is None or (view.generation == session.generation and not self.state.present())
        return PushDismissed(session.member_id, last)

    def _form(self, members: tuple[Session, ...], meeting: Meeting | None) -> list[Effect]:
        self.state.generation += 1
        seats = tuple(
            Seat(rank, s.member_id, s.token_sha256, s.process, s.address, s.arrival) for rank, s in enumerate(members)
        )
        explicit = members[0].claimed_rank is not None
        view = View(self.state.generation, members[0].settings, explicit, seats)
        if meeting is not None:
            assert self.state.view is not None, "a meeting is of a view's members"
            assert meeting.base is not None, "a line goes on from a state"
            begins = self.state.view.base is None
            lost = what_is_lost(self.state.reached, meeting.base) if begins else self.state.view.lost
            view = replace(view, base=meeting.base, newcomers=meeting.newcomers, manifest=meeting.manifest, lost=lost)
        self.state.forming = view
        self._gone_meanwhile.clear()
        return [StoreView(view)]

    def _view_stored(self, now: float, generation: int) -> list[Effect]:
        view = self.state.forming
        if view is None or view.generation != generation:
            return []
        self.state.forming = None
        sessions = [self.state.sessions.get(seat.member_id) for seat in view.seats]
        attached = [session for session in sessions if session is not None and session.stream is not None]
        if view.base is None and len(attached) < len(view.seats):
            # Somebody went meanwhile: the number is used up, nobody has heard of it. A line's view is not given up like
            # that: on the disk it has replaced the one before, whose members would be forgotten.
            return [ForgetView(generation), *self._reconsider(now)]
        there = self.state.present() if self.state.view is not None else []
        seated = set(sessions)
        unseated = [session for session in there if session not in seated]
        leavers = tuple(s for s in unseated if s.met is not None and s.met.leaving)
        spares = [s for s in unseated if s.has_met and not (s.met is not None and s.met.leaving)]
        self.state.view, self.state.verdict, self.state.vouched_at = view, None, now
        if view.base is not None:
            self.state.reached = view.base.step
        self.state.restored = False
        self.state.endings.clear()
        self._evidence.clear()
        self._orders.clear()
        self._barriers = Barriers(view, self._settings.max_open_barriers)
        effects: list[Effect] = []
        for rank, session in enumerate(sessions):
            if session is not None:
                session.standing, session.rank = Standing.IN_VIEW, rank
                session.generation = session.last_generation = generation
                session.verdict, session.met, session.progress = None, None, Progress()
                effects.append(PushView(session.member_id, view, rank))
        effects += self._dismiss(now, leavers)
        for session in spares:
            self._become_candidate(now, session)
            session.came_back = True
            effects.append(PushSpare(session.member_id, generation))
        missing = {
            rank: self._gone_meanwhile[view.seats[rank].member_id] for rank, s in enumerate(sessions) if s is None
        }
        for rank, ending in missing.items():
            effects += self._mark(rank, replace(ending, orderly=False))
        if missing:
            verdict = self._evidence.judge(now, {rank: ending.how for rank, ending in missing.items()})
            effects += self._void(now, verdict)
        return effects + self._reconsider(now)

    def _store_failed(self, now: float, event: StoreFailed) -> list[Effect]:
        if self.state.forming is None or self.state.forming.generation != event.generation:
            return []
        self.state.forming = None
        self.state.storage_trouble = event.text
        self._retry_at = now + _STORE_RETRY
        return self._reconsider(now)
