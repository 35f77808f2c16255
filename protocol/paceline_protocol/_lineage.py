"""How the generations of a job follow each other: views form, members meet, the line is finished or begun anew.

Every event that may change the policy's decision ends in `Lineage.reconsider`, which asks `_policy` again and carries
out what it decides. To decide, it looks at all workers. So in a job of many workers it is asked only now and then while
many events come (decision 01).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline_protocol import _admission as admission
from paceline_protocol._departures import Departures, rank_of
from paceline_protocol._events import (
    DrainAsked,
    Effect,
    FinishedLine,
    FinishStored,
    ForgetView,
    MetOthers,
    Send,
    StoreFailed,
    StoreFinished,
    StoreReached,
    StoreView,
)
from paceline_protocol._job_state import JobState, Session, Standing
from paceline_protocol._meeting import Awaited, Meeting, going_candidates, what_is_lost
from paceline_protocol._orders import Announcer, Orders
from paceline_protocol._policy import Decision, decide
from paceline_protocol._refusals import BadRequest, SessionEnded
from paceline_protocol._replicas import leavers
from paceline_protocol._values import Ending, Meet, Progress, ProtocolSettings, Seat, Verdict, View
from paceline_protocol._versions import spoken_by
from paceline_protocol.messages import Dismissed, Drain, Finished, Spare, StateLost, ViewFormed
from pacelinepb.v1.errors_pb2 import ErrorReason

_NEVER = float("inf")
_SHORTEST_PAUSE = 0.002
"""A job whose pause between two decisions would be shorter, in seconds, has none."""

_STORE_RETRY = 1.0
"""Seconds before a view that could not be stored is tried again, under a new number."""


class Lineage:
    """The chain of a job's generations; changes the job's state.

    `decision` is the policy's last word. `waits_since` says since when there are workers and no view that goes on; None
    while there is one, or nobody.
    """

    def __init__(self, state: JobState, settings: ProtocolSettings, departures: Departures) -> None:
        self._state = state
        self._settings = settings
        self._departures = departures
        self._leases, self._evidence = departures.leases, departures.evidence
        self._stragglers, self._barriers = departures.stragglers, departures.barriers
        self._announcer = Announcer(settings.announce_interval)
        self._retry_at = _NEVER
        self._orders = Orders(state)
        self._awaited: Awaited | None = None  # while a meeting waits for nothing but these
        self._paused_until = -_NEVER  # no decision before
        self._undecided = False  # something has happened since the last decision
        self._newcomers: dict[Session, None] = {}  # they have come since the last decision
        self._absent = 0  # rank of a member of the stored view that was not here when last looked for
        self.decision = decide(-_NEVER, state, settings.settle_time)
        self.waits_since: float | None = None

    def meet(self, now: float, event: MetOthers) -> list[Effect]:
        """A member has stopped, or a candidate is ready, and says what it holds."""
        session = self._state.sessions.get(event.member_id)
        if session is None or session.standing is Standing.DISMISSED:
            return []
        session.heard = session.lease_from = now
        if self._state.finished is not None:
            return [Send(session.member_id, Finished(self._state.finished))]
        met, view = event.met, self._state.view
        if met.generation > session.last_generation:
            raise BadRequest(f"a meeting after generation {met.generation}, which the member is not in")
        admission.check_meet(session, met)
        if met.generation < session.generation:
            return []  # said before it heard of its new view
        if session.standing is not Standing.CANDIDATE and (view is None or view.generation != session.generation):
            # Its view was forgotten, for it had no base yet: now it is a candidate like any other.
            self._become_candidate(now, session)
        # The state may be a checkpoint of another coordinator's job: tags of this line must be greater (I3).
        tags = [tag.generation for tag in (met.tag, met.prepared) if tag is not None]
        self._state.generation = max(self._state.generation, *tags, 0)
        before = session.met
        session.met = replace(met, generation=session.generation, holds_base=met.holds_base and session.generation > 0)
        session.catching_up = False
        self._orders.forget(session)
        if session.generation:
            self._leases.count_unseen(now)  # nobody vouches for members that are not here at a change of views
        effects = self._cross_off(now, session, before)
        return self.reconsider(now) if effects is None else effects

    def finish(self, now: float, event: FinishedLine) -> list[Effect]:
        """A member saw the closing word complete: the job is done once that is stored."""
        session = self._state.sessions.get(event.member_id)
        if session is None:
            return []
        session.heard = session.lease_from = now
        if self._state.finished is not None:
            return [Send(session.member_id, Finished(self._state.finished))]
        if event.generation != session.generation or self._state.view is None or self._state.view.base is None:
            return []
        if self._state.finishing is not None:
            return []
        self._state.finishing = event.step
        return [StoreFinished(event.step)]

    def finish_stored(self, now: float, event: FinishStored) -> list[Effect]:
        """That the job is done is durable: everyone is told."""
        if self._state.finishing != event.step:
            return []
        self._state.finishing, self._state.finished = None, event.step
        effects: list[Effect] = [Send(member_id, Finished(event.step)) for member_id in self._state.sessions]
        return effects + self.reconsider(now)

    def drain(self, now: float, event: DrainAsked) -> list[Effect]:
        """Tells members to leave at their next step boundary."""
        effects: list[Effect] = []
        for member_id in event.member_ids:
            if (session := self._state.sessions.get(member_id)) is not None:
                session.draining = event.reason
                effects.append(Send(member_id, Drain(event.reason)))
        return effects + self.reconsider(now)

    def restart(self, now: float) -> list[Effect]:
        """Declares the members of the last view dead, as an operator asked; a finished job begins again."""
        effects: list[Effect] = []
        if self._state.finished is not None or self._state.finishing is not None:
            self._state.finished = self._state.finishing = self._state.reached = None  # what is done cannot be lost
            effects += [StoreFinished(None), StoreReached(None)]
        ending = Ending("was declared dead by the operator (paceline restart)", orderly=False)
        view = self._state.view
        if view is not None:
            there = [(session, replace(ending, lives=session.stream is not None)) for session in self._state.of_view()]
            effects += self._departures.lose(now, there)
            for rank, known in list(self._state.endings.items()):
                if not known.sure:
                    effects += self._departures.mark(rank, ending)
        return effects + self.reconsider(now)

    def tell_again(self, session: Session) -> None:
        """Forgets what this member was told about a meeting, so that it is told again."""
        self._orders.forget(session)

    def retry_storing(self, now: float) -> None:
        """Tries again to form a view, if some time has passed since one could not be stored."""
        if now >= self._retry_at:
            self._state.storage_trouble, self._retry_at = "", _NEVER

    def next_deadline(self) -> float:
        """When time alone may change something here, infinity for never."""
        if self._undecided:
            return self._paused_until
        settled_at = self.decision.again_at if self.decision.again_at is not None else _NEVER
        # While a view is being stored no waiting candidate is told anything: what is due waits for the disk.
        tell_at = min(self._announcer.announce_at, self._orders.lookouts.ask_at)
        tell_at = tell_at if self._state.forming is None else _NEVER
        return min(settled_at, tell_at, self._retry_at, self._stragglers.due_at)

    # Views ------------------------------------------------------------------------------------------------------------

    def reconsider(self, now: float, newcomer: Session | None = None) -> list[Effect]:
        """Asks the policy again, and carries out its decision. Every event that may change the decision ends here.

        If the policy has been asked a moment ago, it is asked once for all events of that moment, at `next_deadline`.
        """
        self._awaited = None
        if newcomer is not None:
            self._newcomers[newcomer] = None
        self._undecided = now < self._paused_until
        if self._undecided:
            return []
        newcomers = [each for each in self._newcomers if self._state.sessions.get(each.member_id) is each]
        self._newcomers.clear()
        effects = self._decide(now, newcomers)
        view, sessions = self._state.view, self._state.sessions
        pause = self._settings.pace * max(len(sessions), len(view.seats) if view is not None else 0)
        self._paused_until = now + pause if pause >= _SHORTEST_PAUSE else -_NEVER
        return effects

    def _decide(self, now: float, newcomers: list[Session]) -> list[Effect]:
        effects = self._departures.evict_stragglers(now) + self._departures.end_mates(now) + self._gather_mates(now)
        view = self._state.view
        if view is not None and self._line_is_over(view):
            effects += self._forget_view(view)
        effects += self._let_candidates_go(now)
        self.decision = decide(now, self._state, self._settings.settle_time)
        meeting = self.decision.meeting
        if meeting is not None and meeting.over:
            effects += self._start_new_line(now, meeting)
            self.decision = decide(now, self._state, self._settings.settle_time)
            meeting = self.decision.meeting
        if self._state.live is not None or not self._state.sessions:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now
        if self.decision.members is not None:
            return effects + self._form(self.decision.members, meeting)
        if self._state.forming is not None:  # the view will say more
            return effects
        effects += self._orders.give(now, self.decision)
        if meeting is not None and meeting.dismissed:
            effects += self._dismiss(now, meeting.dismissed)
        if view is not None and meeting is not None and meeting.wording:
            self._awaited = Awaited(view, meeting, len(self._state.present()))
        return effects + self._announcer.announce(now, self.decision.reason, self._who_wait(), newcomers)

    def _cross_off(self, now: float, session: Session, before: Meet | None) -> list[Effect] | None:
        """The decision if only one member less is waited for; None if the policy must be asked again."""
        awaited = self._awaited
        if awaited is None or now >= self._stragglers.due_at:
            return None
        reason = awaited.cross_off(session, before)
        if reason is None:
            return None
        meeting = awaited.meeting
        self.decision = Decision(None, reason, meeting=meeting)
        effects = self._orders.give_one(now, session, meeting if session in awaited else None)
        if now < self._announcer.announce_at < _NEVER:  # the next round tells this, too
            return effects
        return effects + self._announcer.announce(now, reason, self._who_wait())

    def _line_is_over(self, view: View) -> bool:
        """True if all members have gone, and their view had no base yet or the job is done; not while another forms."""
        endings = self._state.endings
        if self._state.forming is not None or len(endings) < len(view.seats):
            return False
        is_done = self._state.finished is not None and all(ending.sure for ending in endings.values())
        return view.base is None or is_done

    def _who_wait(self) -> Iterator[Session]:
        yield from self._state.candidates()
        for seat in self._state.view.seats if self._state.view is not None else ():
            session = self._state.sessions.get(seat.member_id)
            if session is None or session.stream is None:
                continue
            if self._state.is_present(session) and session.has_met:
                yield session

    def _forget_view(self, view: View) -> list[Effect]:
        self._state.view, self._state.verdict, self._state.restored = None, None, False
        self._barriers.begin(None)
        self._state.endings.clear()
        self._evidence.clear()
        reached = [] if self._state.reached is None else [StoreReached(self._state.reached)]
        return [*reached, ForgetView(view.generation)]

    def see_generation(self, now: float, generation: int, failure_timeout: float) -> list[Effect]:
        """Notes that a worker was in this generation. If it is news, what is stored is an older copy, or was lost.

        Then a stored view says nothing about the line any more: its members, and those that the coordinator has never
        heard of, come back as new ones, each with the state that it holds.
        """
        view = self._state.view
        # The view's number counts. The job's may be greater, because of a tag that a worker found on its disk.
        is_old = view is not None and self._state.restored and generation > view.generation
        if generation <= self._state.generation and not is_old:
            return []
        self._state.generation = max(self._state.generation, generation)
        self._state.patient_until = now + failure_timeout
        if view is None or not is_old:
            return []
        text = f"the stored state of job {self._state.name!r} is old: it knows nothing of generation {generation}"
        effects: list[Effect] = []
        for session in [s for s in self._state.sessions.values() if s.generation == view.generation]:
            effects += self._departures.end(
                session, Ending("belongs to an old copy of the state", orderly=False, lives=True), SessionEnded(text)
            )
        if self._state.forming is not None:
            effects.append(ForgetView(self._state.forming.generation))
            self._state.forming = None
        return effects + self._forget_view(view)

    def trust_stored_view(self) -> None:
        """Trusts the stored view once all of its members are here and in that generation: it is their line's latest.

        A worker that shows a greater number belongs to another line then, and must not end this one.
        """
        seats = self._state.view.seats if self._state.restored and self._state.view is not None else ()
        for _ in seats:  # from the one that was not here last time: all of them come back one by one
            session = self._state.sessions.get(seats[self._absent].member_id)
            if session is None or session.stream is None:
                return
            self._absent = (self._absent + 1) % len(seats)
        self._state.restored = False

    def _start_new_line(self, now: float, meeting: Meeting) -> list[Effect]:
        """Ends the line: its last members become candidates for the next, except those that hold no state.

        Members and candidates whose shares are of no use any more begin with a checkpoint.
        """
        view = self._state.view
        assert view is not None
        effects: list[Effect] = []
        present = self._state.of_view()
        lost = set(meeting.lost)
        for session in meeting.lost:
            self._become_candidate(now, session)
            effects.append(Send(session.member_id, StateLost(meeting.reason)))
        for session in (session for session in present if session not in lost):
            if session.met is None or not session.has_met:  # it waits for its mates, or for one of them in a collective
                self._become_candidate(now, session)
                continue
            if session.met.tag is None:
                text = (
                    "all members that held the state of the job have ended, and this worker's own state is incomplete: "
                    "start it again"
                )
                effects += self._departures.end(session, Ending("held no state", orderly=False), SessionEnded(text))
                continue
            met = replace(session.met, generation=0, holds_base=False)
            self._become_candidate(now, session)
            session.met = met
        return effects + self._forget_view(view)

    def _gather_mates(self, now: float) -> list[Effect]:
        """Makes members candidates whose mates have come back as such: a replica gets its seats as a whole.

        So it does with those that want to leave: without their mates they are of no use to the meeting.
        """
        view = self._state.view
        if (
            view is None
            or view.settings.replica_size == 1
            or self._state.live is view
            or self._state.forming is not None
        ):
            return []
        effects: list[Effect] = []
        present = set(self._state.present())
        for session in [session for session in self._state.of_view() if session not in present]:
            mates = self._state.sessions.of_replica(session.replica)
            leaves = session.met is not None and session.met.leaving
            if leaves or any(mate.standing is Standing.CANDIDATE for mate in mates):
                ending = Ending("waits with the rest of its replica", orderly=False, lives=True)
                effects += self._departures.mark(rank_of(session), ending)
                self._become_candidate(now, session)
                session.came_back = True
                spare = Spare("a rank of its replica has lost its seat", view.generation)
                effects.append(Send(session.member_id, spare))
        return effects

    def _become_candidate(self, now: float, session: Session) -> None:
        """Makes a member a candidate again, which has yet to say what it holds."""
        session.standing, session.generation, session.rank = Standing.CANDIDATE, 0, None
        session.verdict, session.met, session.told_to_meet, session.catching_up = None, None, None, False
        session.promised = None
        self._state.last_arrival = now

    def _let_candidates_go(self, now: float) -> list[Effect]:
        """Dismisses candidates that want to leave while a line runs, since the line does not need their state."""
        live = self._state.live
        if live is None or live.base is None or self._state.forming is not None:
            return []
        leaving = tuple(going_candidates(self._state))
        if not leaving or any(session.has_met for session in self._state.present()):
            return []
        return self._dismiss(now, leaving)

    def _dismiss(self, now: float, sessions: tuple[Session, ...]) -> list[Effect]:
        live = self._state.live
        there = self._state.sessions.values()
        gone = [s for s in there if s.standing is Standing.DISMISSED and live and s.generation == live.generation]
        for session in sessions:
            session.standing = Standing.DISMISSED
        told = {session.member_id: self.dismissal(session) for session in sessions}
        effects: list[Effect] = []
        if gone and live is not None and any(dismissed.last for dismissed in told.values()):
            # A member that was let go before keeps nothing and may stay for long: the last ones must not wait for it.
            ranks = tuple(sorted(rank_of(session) for session in gone))
            text = f"{', '.join(live.seats[rank].short_label for rank in ranks)} left before the others"
            effects += self._departures.void(
                now, Verdict(live.generation, ErrorReason.ERROR_REASON_PEER_LOST, ranks, 0, text)
            )
        return [*effects, *(Send(member_id, dismissed) for member_id, dismissed in told.items())]

    def dismissal(self, session: Session) -> Dismissed:
        """Tells a member that it may go. If nobody stays, the last ones write a checkpoint together."""
        view = self._state.view
        last = view is None or (view.generation == session.generation and not self._state.present())
        return Dismissed(last)

    def _form(self, members: tuple[Session, ...], meeting: Meeting | None) -> list[Effect]:
        self._state.generation += 1
        seats = tuple(
            Seat(rank, s.member_id, s.process, s.address, s.token_sha256, s.arrival, s.replica, s.settings.replica_size)
            for rank, s in enumerate(members)
        )
        explicit = members[0].claimed_rank is not None
        versions = spoken_by([session.versions for session in members])
        view = View(self._state.generation, members[0].settings, explicit, seats, versions)
        if meeting is not None:
            assert self._state.view is not None, "a meeting is of a view's members"
            assert meeting.base is not None, "a line goes on from a state"
            begins = self._state.view.base is None
            lost = what_is_lost(self._state.reached, meeting.base) if begins else self._state.view.lost
            view = replace(view, base=meeting.base, newcomers=meeting.newcomers, manifest=meeting.manifest, lost=lost)
        self._state.forming = view
        for session in members:
            if session.launch is not None:
                self._state.launches.over(session.launch.id)
        self._departures.gone_meanwhile.clear()
        return [StoreView(view)]

    def view_stored(self, now: float, generation: int) -> list[Effect]:
        """The view is durable: its members are told, and those that have gone meanwhile make it void."""
        view = self._state.forming
        if view is None or view.generation != generation:
            return []
        self._state.forming = None
        sessions = [self._state.sessions.get(seat.member_id) for seat in view.seats]
        attached = [session for session in sessions if session is not None and session.stream is not None]
        if view.base is None and len(attached) < len(view.seats):
            # A member went meanwhile, and nobody has heard of this view: it is given up, and its number stays used. Not
            # so a view with a base: on disk it has replaced the one before, whose members would be forgotten.
            return [ForgetView(generation), *self.reconsider(now)]
        there = self._state.of_view() if self._state.view is not None else []
        seated = set(sessions)
        unseated = [session for session in there if session not in seated]
        going = leavers(unseated)
        spares = [s for s in unseated if s not in going and (s.has_met or s.replica)]
        self._state.view, self._state.verdict, self._state.vouched_at = view, None, now
        self.waits_since = None
        if view.base is not None:
            self._state.reached = view.base.step
        self._state.restored = False
        self._state.endings.clear()
        self._evidence.clear()
        self._orders.clear()
        self._barriers.begin(view)
        effects: list[Effect] = []
        for rank, session in enumerate(sessions):
            if session is not None:
                session.standing, session.rank = Standing.IN_VIEW, rank
                session.generation = session.last_generation = generation
                session.verdict, session.met, session.progress = None, None, Progress()
                effects.append(Send(session.member_id, ViewFormed.of(view, rank)))
        effects += self._dismiss(now, tuple(s for s in unseated if s in going))
        for session in spares:
            self._become_candidate(now, session)
            session.came_back = True
            spare = Spare(f"generation {generation} has no seat for it", generation)
            effects.append(Send(session.member_id, spare))
        missing = {
            rank: self._departures.gone_meanwhile[view.seats[rank].member_id]
            for rank, s in enumerate(sessions)
            if s is None
        }
        for rank, ending in missing.items():
            effects += self._departures.mark(rank, replace(ending, orderly=False))
        if missing:
            verdict = self._evidence.judge(now, {rank: ending.how for rank, ending in missing.items()})
            effects += self._departures.void(now, verdict)
        return effects + self.reconsider(now)

    def store_failed(self, now: float, event: StoreFailed) -> list[Effect]:
        """The view could not be stored; it is tried again a little later."""
        if self._state.forming is None or self._state.forming.generation != event.generation:
            return []
        self._state.forming = None
        self._state.storage_trouble = event.text
        self._retry_at = now + _STORE_RETRY
        return self.reconsider(now)
