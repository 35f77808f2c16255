"""The state machine of one job: who is a member, which view is live, what ended it. Pure.

`Membership.handle(now, event)` changes the state and returns effects for the shell to perform, in order. It calls no
clock, opens nothing and waits for nothing. When a view forms is `policy`'s to say, who is to blame `verdict`'s, who is
too silent `leases`', who may register `admission`'s, who is told that it waits `announcer`'s; barriers are `barriers`'.

Rules that the transitions keep:
- A generation number is used once, stored before anyone hears of it, and above any number that a member showed (I3).
- A stream's end is suspicion. A session ends by `leave`, by its process's reported exit, or by silence.
- A void view's members get its verdict, also when they resume, and never come back in.
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
    Effect,
    EndSession,
    Event,
    ExitReported,
    FailBarrier,
    ForgetView,
    Heard,
    LeftJob,
    PushVerdict,
    PushView,
    Registered,
    Reported,
    Resumed,
    StoreEnding,
    StoreFailed,
    StoreVerdict,
    StoreView,
    StreamEnded,
    Ticked,
    ViewStored,
    Welcome,
)
from paceline_server.evidence import Evidence
from paceline_server.leases import Leases
from paceline_server.model import Ending, JobState, Process, Progress, Report, Seat, Session, Standing, Verdict, View
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
            effects += self._end(ghost, SessionEnded(text))
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
        return effects + self._reconsider(now, newcomer=session)

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
        return effects

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
        how = describe_exit(event.exit_code)
        sessions = self.find(event.process)
        return self._lose(now, [(session, how) for session in sessions]) + self._reconsider(now)

    def _leave(self, now: float, event: LeftJob) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None:
            return []
        in_view = session.standing is Standing.IN_VIEW
        if not in_view:
            return self._end(session, None) + self._reconsider(now)
        assert self.state.view is not None
        seat = self.state.view.seats[_rank(session)]
        effects: list[Effect] = []
        if event.cause:
            # Its reason is what the others must hear, not that its links have ended.
            raised = ErrorReason.ERROR_REASON_PEER_RAISED
            text = f"{seat.label} raised {event.cause}"
            self._evidence.add(now, Report(seat.rank, raised, None, session.progress.operation, text))
            effects += self._mark(seat.rank, Ending("left the job with an error", orderly=False))
            effects += self._end(session, None)
            effects += self._void(self._evidence.judge(now, {}))
        else:
            effects += self._mark(seat.rank, Ending("left the job", orderly=True))
            effects += self._end(session, None)
            if self._barriers is not None:
                effects += self._barriers.withdraw(seat)
            effects += self._judge_if_ripe(now)
        return effects + self._reconsider(now)

    def _lose(self, now: float, lost: list[tuple[Session, str]]) -> list[Effect]:
        """Ends sessions that are surely gone, each with how; voids the view if one was in it."""
        gone = {_rank(session): how for session, how in lost if session.standing is Standing.IN_VIEW}
        effects: list[Effect] = []
        for rank, how in gone.items():
            effects += self._mark(rank, Ending(how, orderly=False))
        if gone:  # before the sessions end: a frozen member's stream still takes the verdict
            effects += self._void(self._evidence.judge(now, gone))
        for session, how in lost:
            effects += self._end(session, SessionEnded(f"the session has ended: the member {how}"))
        return effects

    def _mark(self, rank: int, ending: Ending) -> list[Effect]:
        """Remembers how a member of the live view went."""
        assert self.state.view is not None
        self.state.endings[rank] = ending
        return [StoreEnding(self.state.view.generation, rank, ending)]

    def _end(self, session: Session, refusal: SessionEnded | None) -> list[Effect]:
        """Forgets a session; `refusal` is None for an orderly end."""
        del self.state.sessions[session.member_id]
        view = self.state.view
        if session.standing is Standing.VOID and view is not None and session.generation == view.generation:
            self.state.endings.setdefault(_rank(session), Ending("went after the verdict", orderly=False))
        return [EndSession(session.member_id, refusal)]

    # Signs of life, barriers, time ------------------------------------------------------------------------------------

    def _heard(self, now: float, event: Heard) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is not None:
            session.heard = session.lease_from = now
            session.progress = event.progress
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
        effects = self._judge_if_ripe(now) + self._lose(now, self._leases.lapsed(now))
        if self._barriers is not None:
            effects += self._barriers.expire(now, lambda rank: self._leases.whereabouts(now, rank))
        if now >= self._retry_at:
            self.state.storage_trouble, self._retry_at = "", _NEVER
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
        if view is not None and len(self.state.endings) == len(view.seats):
            effects.append(ForgetView(view.generation))
            self.state.view, self._barriers = None, None
            self.state.endings.clear()
            self._evidence.clear()
        self.decision = decide(now, self.state, self._settings.settle_time)
        if self.decision.members is not None:
            return effects + self._form(self.decision.members)
        if self.state.forming is not None:  # the view will say more
            return effects
        return effects + self._announcer.announce(now, self.decision.reason, self.state.candidates(), newcomer)

    def _form(self, members: tuple[Session, ...]) -> list[Effect]:
        shown = max(session.generation_floor for session in self.state.sessions.values())
        self.state.generation = max(self.state.generation, shown) + 1
        seats = tuple(
            Seat(rank, s.member_id, s.token_sha256, s.process, s.address, s.arrival) for rank, s in enumerate(members)
        )
        explicit = members[0].claimed_rank is not None
        view = View(self.state.generation, members[0].settings, explicit, seats)
        self.state.forming = view
        return [StoreView(view)]

    def _view_stored(self, now: float, generation: int) -> list[Effect]:
        view = self.state.forming
        if view is None or view.generation != generation:
            return []
        self.state.forming = None
        sessions = [self.state.sessions.get(seat.member_id) for seat in view.seats]
        there = [session for session in sessions if session is not None and session.stream is not None]
        if len(there) < len(view.seats):  # somebody went meanwhile: the number is used up, nobody has heard of it
            return [ForgetView(generation), *self._reconsider(now)]
        self.state.view, self.state.verdict = view, None
        self.state.endings.clear()
        self._barriers = Barriers(view, self._settings.max_open_barriers)
        effects: list[Effect] = []
        for rank, session in enumerate(there):
            session.standing, session.rank, session.generation = Standing.IN_VIEW, rank, generation
            effects.append(PushView(session.member_id, view, rank))
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
