"""The state machine of one job: who is a member, which view is live, what ended it. Pure.

`Membership.handle(now, event)` changes the state and returns effects for the shell to perform, in order. It calls no
clock, opens nothing and waits for nothing. When a view forms is `policy`'s to say, who is to blame `verdict`'s, who is
too silent `leases`', who may register `admission`'s, who is told that it waits `announcer`'s; barriers are `barriers`'.

Rules that the transitions keep:
- A generation number is used once, stored before anyone hears of it, and above any number that a member showed (I3).
- A stream's end is suspicion. A session ends by `leave`, by its process's reported exit, or by silence.
- A void view's members get its verdict, also when they resume. They go, or meet for the next one (`meeting`).
- A line's last view is kept until all its members are known to have ended: whoever is silent may hold the state.
- Nothing is kept of sessions that have ended, but for how the members of the last view went.
"""

from __future__ import annotations

from dataclasses import replace

from paceline_server import admission
from paceline_server.announcer import Announcer
from paceline_server.barriers import Barriers
from paceline_server.errors import BadRequest, SessionEnded
from paceline_server.events import (
    BarrierEntered,
    DrainAsked,
    Effect,
    EndSession,
    Event,
    ExitReported,
    FailBarrier,
    FinishedLine,
    ForgetView,
    Heard,
    LeftJob,
    MetOthers,
    PushDismissed,
    PushDrain,
    PushFinished,
    PushVerdict,
    PushView,
    Registered,
    Reported,
    RestartAsked,
    Resumed,
    StoreEnding,
    StoreFailed,
    StoreFinished,
    StoreVerdict,
    StoreView,
    StreamEnded,
    Ticked,
    ViewStored,
    Welcome,
)
from paceline_server.evidence import Evidence
from paceline_server.leases import Leases
from paceline_server.meeting import Meeting
from paceline_server.model import Ending, JobState, Process, Progress, Report, Seat, Session, Standing, Verdict, View
from paceline_server.orders import Orders
from paceline_server.policy import decide
from paceline_server.settings import ServerSettings
from paceline_server.verdict import describe_exit
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["Membership"]

_NEVER = float("inf")
_STORE_RETRY = 1.0
"""Seconds before a view that could not be stored is tried again, under a new number."""


class Membership:
    """One job.

    Args:
        state: the job as it is at the start: empty, or as it was stored. Owned by this object from then on.
        settings: the coordinator's settings.

    Attributes:
        state: the job as it is; for reading.
        decision: the policy's last word, with its sentence.
    """

    def __init__(self, state: JobState, settings: ServerSettings) -> None:
        self.state = state
        self._settings = settings
        self._leases = Leases(state)
        self._evidence = Evidence(state, settings)
        self._barriers = Barriers(state.view, settings.max_open_barriers) if state.view else None
        self._arrivals = max((session.arrival for session in state.sessions.values()), default=0)
        self._announcer = Announcer(settings.announce_interval)
        self._retry_at = _NEVER
        self._orders = Orders(state)
        self._gone_meanwhile: dict[str, Ending] = {}  # sessions that ended while a view with them was being stored
        self.decision = decide(-_NEVER, state, settings.settle_time)

    # The interface to the shell ---------------------------------------------------------------------------------------

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Takes an event in and returns what is to be done about it, in order.

        Args:
            now: the time, in seconds.
            event: what happened. Events of sessions that have ended are ignored.

        Raises:
            Refused: a Registered, Resumed or Reported that must not be; nothing has changed then.
        """
        match event:
            case Heard():
                return self._heard(now, event)
            case BarrierEntered():
                return self._enter_barrier(now, event)
            case Ticked():
                return self._tick(now, event.slept)
            case Registered():
                return self._register(now, event)
            case Resumed():
                return self._resume(now, event)
            case StreamEnded():
                return self._stream_ended(now, event)
            case Reported():
                return self._report(now, event)
            case ExitReported():
                return self._exit_reported(now, event)
            case LeftJob():
                return self._leave(now, event)
            case MetOthers():
                return self._meet(now, event)
            case FinishedLine():
                return self._finish(now, event)
            case DrainAsked():
                return self._drain(now, event)
            case RestartAsked():
                return self._restart(now)
            case ViewStored():
                return self._view_stored(now, event.generation)
            case StoreFailed():
                return self._store_failed(now, event)

    def next_deadline(self) -> float:
        """When the next `Ticked` is due at the latest, infinity for never."""
        barriers = self._barriers.next_deadline() if self._barriers else _NEVER
        settle = self.decision.again_at if self.decision.again_at is not None else _NEVER
        return min(
            self._evidence.judge_at,
            self._leases.check_at,
            barriers,
            settle,
            self._announcer.announce_at,
            self._retry_at,
        )

    def find(self, process: Process) -> list[Session]:
        """The live sessions of a process."""
        return [session for session in self.state.sessions.values() if session.process.is_same(process)]

    # Coming -----------------------------------------------------------------------------------------------------------

    def _register(self, now: float, event: Registered) -> list[Effect]:
        effects: list[Effect] = []
        for ghost in admission.check(self.state, event):
            text = f"its place was taken over by {event.process.host} (pid {event.process.pid})"
            effects += self._end(ghost, Ending(text, orderly=False), SessionEnded(text))
        effects += self._came_back(now, event)
        self._arrivals += 1
        session = Session(
            member_id=event.member_id,
            token_sha256=event.token_sha256,
            process=event.process,
            address=event.address,
            settings=event.settings,
            claimed_rank=event.claimed_rank,
            generation_floor=event.generation_floor,
            arrival=self._arrivals,
            stream=event.stream,
            heard=now,
            lease_from=now,
        )
        self.state.sessions[session.member_id] = session
        self.state.last_arrival = now
        self._leases.began(session)
        effects.append(Welcome(session.member_id, session.settings.heartbeat_interval))
        if self.state.finished is not None:
            effects.append(PushFinished(session.member_id, self.state.finished))
        return effects + self._reconsider(now, newcomer=session)

    def _came_back(self, now: float, event: Registered) -> list[Effect]:
        """A process whose session has ended, or is about to, is no silent member of the last view any more."""
        former, view = event.former_member_id, self.state.view
        if not former:
            return []
        ending = Ending("came back as a new member", orderly=False)
        if (session := self.state.sessions.get(former)) is not None:
            return self._lose(now, [(session, ending)])
        for seat in view.seats if view is not None else ():
            known = self.state.endings.get(seat.rank)
            if seat.member_id == former and known is not None and not known.sure:
                return self._mark(seat.rank, ending)
        return []

    def _resume(self, now: float, event: Resumed) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None or session.token_sha256 != event.token_sha256:
            raise SessionEnded(self._why_unknown(event))
        session.stream, session.stream_ended = event.stream, None
        session.heard = session.lease_from = now
        session.overdue_from = None
        self._leases.began(session)
        effects: list[Effect] = [Welcome(session.member_id, session.settings.heartbeat_interval)]
        if session.standing is Standing.WAITING:
            self.state.last_arrival = now
            return effects + self._reconsider(now, newcomer=session)
        view = self.state.view
        if view is not None and event.generation < session.generation == view.generation:
            effects.append(PushView(session.member_id, view, _rank(session)))  # it was lost with the old stream
        if session.verdict is not None:
            effects.append(PushVerdict(session.member_id, session.verdict))
        if session.draining:
            effects.append(PushDrain(session.member_id, session.draining))
        if self.state.finished is not None:
            effects.append(PushFinished(session.member_id, self.state.finished))
        self._orders.forget(session)  # what it was told may be lost with the old stream
        return effects + self._reconsider(now)

    def _why_unknown(self, event: Resumed) -> str:
        if self.state.verdict is not None and event.generation == self.state.verdict.generation:
            return f"the session has ended: {self.state.verdict.text}"
        return (
            f"job {self.state.name!r} has no such session: it has ended, or the coordinator was started again before "
            f"the member was in a view (the job's last generation is {self.state.generation})"
        )

    # Going ------------------------------------------------------------------------------------------------------------

    def _stream_ended(self, now: float, event: StreamEnded) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None or session.stream != event.stream:
            return []
        session.stream = None
        session.stream_ended = session.lease_from = now
        self._leases.began(session)
        return self._judge_if_ripe(now) + self._reconsider(now)

    def _exit_reported(self, now: float, event: ExitReported) -> list[Effect]:
        ending = Ending(describe_exit(event.exit_code), orderly=False)
        effects = self._lose(now, [(session, ending) for session in self.find(event.process)])
        for seat in self.state.view.seats if self.state.view is not None else ():
            known = self.state.endings.get(seat.rank)
            if known is not None and not known.sure and seat.process.is_same(event.process):
                effects += self._mark(seat.rank, ending)  # it was only silent until now
        return effects + self._reconsider(now)

    def _leave(self, now: float, event: LeftJob) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None:
            return []
        in_view = session.standing is Standing.IN_VIEW
        if not in_view:
            return self._end(session, Ending("left the job", orderly=True), None) + self._reconsider(now)
        assert self.state.view is not None
        seat = self.state.view.seats[_rank(session)]
        effects: list[Effect] = []
        if event.cause:
            # Its reason is what the others must hear, not that its links have ended.
            raised = ErrorReason.ERROR_REASON_PEER_RAISED
            text = f"{seat.label} raised {event.cause}"
            self._evidence.add(now, Report(seat.rank, raised, None, session.progress.operation, text))
            ending = Ending("left the job with an error", orderly=False)
            effects += self._mark(seat.rank, ending)
            effects += self._end(session, ending, None)
            effects += self._void(self._evidence.judge(now, {}))
        else:
            ending = Ending("left the job", orderly=True)
            effects += self._mark(seat.rank, ending)
            effects += self._end(session, ending, None)
            if self._barriers is not None:
                effects += self._barriers.withdraw(seat)
            effects += self._judge_if_ripe(now)
        return effects + self._reconsider(now)

    def _lose(self, now: float, lost: list[tuple[Session, Ending]]) -> list[Effect]:
        """Ends sessions that are gone, each with how; voids the view if one was in it."""
        gone = {_rank(session): ending for session, ending in lost if session.standing is Standing.IN_VIEW}
        effects: list[Effect] = []
        for rank, ending in gone.items():
            effects += self._mark(rank, ending)
        if gone:  # before the sessions end: a frozen member's stream still takes the verdict
            effects += self._void(self._evidence.judge(now, {rank: ending.how for rank, ending in gone.items()}))
        for session, ending in lost:
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

    # Signs of life, barriers, time ------------------------------------------------------------------------------------

    def _heard(self, now: float, event: Heard) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is not None:
            session.heard = session.lease_from = now
            session.progress = event.progress
            if session.standing is Standing.IN_VIEW and event.progress.step:
                self.state.vouched_at = max(self.state.vouched_at, min(now, event.progress.step_at))
        return []

    def _enter_barrier(self, now: float, event: BarrierEntered) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None:
            return []
        session.heard = session.lease_from = now
        if session.standing is Standing.WAITING or event.generation != session.generation:
            where = f"generation {session.generation}" if session.generation else "no generation yet"
            text = f"barrier {event.name!r} is of generation {event.generation}, but the member is in {where}"
            return [FailBarrier(event.member_id, event.call, ErrorReason.ERROR_REASON_STALE_GENERATION, text)]
        if (verdict := session.verdict) is not None:
            return [FailBarrier(event.member_id, event.call, verdict.reason, verdict.text, verdict.culprits)]
        view = self.state.live
        assert view is not None
        assert self._barriers is not None
        left = (view.seats[rank] for rank, ending in self.state.endings.items() if ending.orderly)
        return self._barriers.enter(now, view.seats[_rank(session)], event, left)

    def _tick(self, now: float, slept: float) -> list[Effect]:
        self._leases.renew_after_stall(now, slept)
        lapsed = [(session, Ending(how, orderly=False, sure=False)) for session, how in self._leases.lapsed(now)]
        effects = self._judge_if_ripe(now) + self._lose(now, lapsed)
        if self._barriers is not None:
            effects += self._barriers.expire(now, lambda rank: self._leases.whereabouts(now, rank))
        if now >= self._retry_at:
            self.state.storage_trouble, self._retry_at = "", _NEVER
        return effects + self._reconsider(now)

    # The line ---------------------------------------------------------------------------------------------------------

    def _meet(self, now: float, event: MetOthers) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None or session.standing is Standing.DISMISSED:
            return []
        session.heard = session.lease_from = now
        met, view = event.met, self.state.view
        if met.generation > session.generation:
            raise BadRequest(f"a meeting after generation {met.generation}, which the member is not in")
        if met.generation < session.generation and met.generation:
            return []  # said before it heard of its new view
        if session.standing is not Standing.WAITING and (view is None or view.generation != session.generation):
            # Its view was forgotten, for it had no state yet: now it is as any other newcomer.
            session.standing, session.generation, session.rank = Standing.WAITING, 0, None
            session.verdict, self.state.last_arrival = None, now
        session.met = replace(met, generation=session.generation, holds_base=met.holds_base and session.generation > 0)
        self._orders.forget(session)
        if session.generation:
            self._leases.count_unseen(now)  # at a change of view nobody vouches for who is not there
        return self._reconsider(now)

    def _finish(self, now: float, event: FinishedLine) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None:
            return []
        session.heard = session.lease_from = now
        if self.state.finished is not None:
            return [PushFinished(session.member_id, self.state.finished)]
        if event.generation != session.generation or self.state.view is None or self.state.view.base is None:
            return []
        self.state.finished = event.step
        effects: list[Effect] = [StoreFinished(event.step)]
        effects += [PushFinished(member_id, event.step) for member_id in self.state.sessions]
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
        if self.state.finished is not None:
            self.state.finished = None
            effects.append(StoreFinished(None))
        ending = Ending("was taken for dead by the operator (paceline restart)", orderly=False)
        view = self.state.view
        if view is not None:
            effects += self._lose(now, [(session, ending) for session in self.state.present()])
            for rank, known in list(self.state.endings.items()):
                if not known.sure:
                    effects += self._mark(rank, ending)
        return effects + self._reconsider(now)

    # The end of a view ------------------------------------------------------------------------------------------------

    def _report(self, now: float, event: Reported) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None:
            return []
        session.heard = session.lease_from = now
        report = event.report
        admission.check_report(session, event)
        if event.generation < session.generation:  # it has moved on since
            return []
        if session.verdict is not None:
            return [PushVerdict(session.member_id, session.verdict)]
        view = self.state.live
        assert view is not None
        if report.accused is not None and report.accused >= len(view.seats):
            raise BadRequest(f"a report that accuses rank {report.accused} in a world of {len(view.seats)}")
        if report.operation > session.progress.operation:  # newer than its last heartbeat
            session.progress = Progress(report.operation, now, inside=True)
        self._evidence.add(now, replace(report, reporter=_rank(session)))
        return self._judge_if_ripe(now) + self._reconsider(now)

    def _judge_if_ripe(self, now: float) -> list[Effect]:
        return self._void(self._evidence.judge(now, {})) if self._evidence.is_ripe(now) else []

    def _void(self, verdict: Verdict) -> list[Effect]:
        """The view is over; every member of it is told the same, now or when it resumes."""
        view = self.state.live
        assert view is not None, "one verdict for each generation"
        self.state.verdict = verdict
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

    # The beginning of a view ------------------------------------------------------------------------------------------

    def _reconsider(self, now: float, newcomer: Session | None = None) -> list[Effect]:
        """Asks the policy again; every event that may change its mind ends here."""
        effects: list[Effect] = []
        view = self.state.view
        if view is not None and self._line_is_over(view):
            effects += self._forget_view(view)
        self.decision = decide(now, self.state, self._settings.settle_time)
        meeting = self.decision.meeting
        if meeting is not None and meeting.over:
            effects += self._begin_anew(now)
            self.decision = decide(now, self.state, self._settings.settle_time)
            meeting = self.decision.meeting
        if self.decision.members is not None:
            return effects + self._form(self.decision.members, meeting)
        if self.state.forming is not None:  # the view will say more
            return effects
        effects += self._orders.give(self.decision)
        if meeting is not None and meeting.dismissed:
            effects += self._dismiss(meeting.dismissed, last=True)
        return effects + self._announcer.announce(now, self.decision.reason, self._who_wait(), newcomer)

    def _line_is_over(self, view: View) -> bool:
        """True if all members of the view have gone, and none that may hold a state is merely silent."""
        endings = self.state.endings
        if len(endings) < len(view.seats):
            return False
        return view.base is None or all(ending.sure for ending in endings.values())

    def _who_wait(self) -> list[Session]:
        met = [s for s in self.state.present() if s.has_met and s.stream is not None] if self.state.view else []
        return self.state.candidates() + met

    def _forget_view(self, view: View) -> list[Effect]:
        self.state.view, self._barriers = None, None
        self.state.endings.clear()
        self._evidence.clear()
        return [ForgetView(view.generation)]

    def _begin_anew(self, now: float) -> list[Effect]:
        """The line is over: its last members are newcomers to the next, but for those that hold nothing."""
        view = self.state.view
        assert view is not None
        effects: list[Effect] = []
        for session in self.state.present():
            assert session.met is not None
            if session.met.tag is None:
                text = (
                    "all who held the state of the job have ended, and this worker's own was not whole: start it again"
                )
                effects += self._end(session, Ending("held no state", orderly=False), SessionEnded(text))
                continue
            session.standing, session.generation, session.rank = Standing.WAITING, 0, None
            session.verdict, self.state.last_arrival = None, now
            session.met = replace(session.met, generation=0, holds_base=False)
        return effects + self._forget_view(view)

    def _dismiss(self, sessions: tuple[Session, ...], *, last: bool) -> list[Effect]:
        for session in sessions:
            session.standing = Standing.DISMISSED
        return [PushDismissed(session.member_id, last) for session in sessions]

    def _form(self, members: tuple[Session, ...], meeting: Meeting | None) -> list[Effect]:
        shown = max(session.generation_floor for session in self.state.sessions.values())
        self.state.generation = max(self.state.generation, shown) + 1
        seats = tuple(
            Seat(rank, s.member_id, s.token_sha256, s.process, s.address, s.arrival) for rank, s in enumerate(members)
        )
        explicit = members[0].claimed_rank is not None
        view = View(self.state.generation, members[0].settings, explicit, seats)
        if meeting is not None:
            view = replace(view, base=meeting.base, newcomers=meeting.newcomers, manifest=meeting.manifest)
        self.state.forming = view
        self._gone_meanwhile.clear()
        return [StoreView(view)]

    def _view_stored(self, now: float, generation: int) -> list[Effect]:
        view = self.state.forming
        if view is None or view.generation != generation:
            return []
        self.state.forming = None
        sessions = [self.state.sessions.get(seat.member_id) for seat in view.seats]
        there = [session for session in sessions if session is not None and session.stream is not None]
        if view.base is None and len(there) < len(view.seats):
            # Somebody went meanwhile: the number is used up, nobody has heard of it. A line's view is not given up like
            # that: on the disk it has replaced the one before, whose members would be forgotten.
            return [ForgetView(generation), *self._reconsider(now)]
        leavers = tuple(s for s in (self.state.present() if self.state.view is not None else []) if s not in sessions)
        self.state.view, self.state.verdict, self.state.vouched_at = view, None, now
        self.state.endings.clear()
        self._evidence.clear()
        self._orders.clear()
        self._barriers = Barriers(view, self._settings.max_open_barriers)
        effects: list[Effect] = []
        for rank, session in enumerate(sessions):
            if session is not None:
                session.standing, session.rank, session.generation = Standing.IN_VIEW, rank, generation
                session.verdict, session.met, session.progress = None, None, Progress()
                effects.append(PushView(session.member_id, view, rank))
        effects += self._dismiss(leavers, last=False)
        missing = {
            rank: self._gone_meanwhile[view.seats[rank].member_id] for rank, s in enumerate(sessions) if s is None
        }
        for rank, ending in missing.items():
            effects += self._mark(rank, replace(ending, orderly=False))
        if missing:
            effects += self._void(self._evidence.judge(now, {rank: ending.how for rank, ending in missing.items()}))
        return effects + self._reconsider(now)

    def _store_failed(self, now: float, event: StoreFailed) -> list[Effect]:
        if self.state.forming is None or self.state.forming.generation != event.generation:
            return []
        self.state.forming = None
        self.state.storage_trouble = event.text
        self._retry_at = now + _STORE_RETRY
        return self._reconsider(now)


def _rank(session: Session) -> int:
    assert session.rank is not None, "a member of a view has a rank"
    return session.rank
