"""The state machine of one job: who is a member, which view is live, what ended it.

`Membership.handle(now, event)` changes the job's state and returns effects for the shell to perform, in order. Here
members come, go and speak; `_departures` ends sessions and views, and `_lineage` forms the next ones.

Rules that the transitions keep:
- A generation number is used once, stored before anybody hears of it, and above any number that a member showed (I3).
- The end of a stream is a suspicion. A session ends when its member leaves, when its process is reported to have ended,
  or when it has been silent for too long.
- The members of a void view get its verdict, also when they resume. They leave, or meet for the next view.
- A line's last view is kept until all its members are known to have ended: a silent member may hold the state.
- Nothing is kept of sessions that have ended, except how the members of the last view went.
"""

from __future__ import annotations

from dataclasses import replace

from paceline_protocol import _admission as admission
from paceline_protocol._departures import Departures, rank_of
from paceline_protocol._events import (
    AddressRefused,
    AskDoor,
    BarrierEntered,
    DoorAnswered,
    DrainAsked,
    Effect,
    Event,
    ExitReported,
    FinishedLine,
    FinishStored,
    Heard,
    LeftJob,
    MetOthers,
    Registered,
    Reported,
    RestartAsked,
    Resumed,
    Send,
    StoreFailed,
    StreamEnded,
    Ticked,
    ViewStored,
    Welcome,
)
from paceline_protocol._job_state import JobState, Session, Standing
from paceline_protocol._lineage import Lineage
from paceline_protocol._policy import Decision
from paceline_protocol._refusals import BadRequest, SessionEnded
from paceline_protocol._replicas import of_view
from paceline_protocol._values import Ending, Process, Progress, ProtocolSettings, Report, Seat, View
from paceline_protocol.messages import BarrierFailed, Drain, Finished, ViewFormed
from pacelinepb.v1.errors_pb2 import ErrorReason


class Membership:
    """The state machine of one job, which owns `state` from the start: empty, or as it was stored."""

    def __init__(self, state: JobState, settings: ProtocolSettings) -> None:
        self.state = state
        self._departures = departures = Departures(state, settings)
        self._leases, self._evidence = departures.leases, departures.evidence
        self._stragglers, self._barriers = departures.stragglers, departures.barriers
        self._lineage = Lineage(state, settings, departures)
        self._arrivals = max((session.arrival for session in state.sessions.values()), default=0)
        self._seated: View | None = None
        self._seats: dict[tuple[str, int], list[Seat]] = {}  # of that view, by host and pid

    @property
    def decision(self) -> Decision:
        """The policy's latest decision, with its sentence."""
        return self._lineage.decision

    @property
    def waits_since(self) -> float | None:
        """Since when there are workers and no view that goes on; None while there is one, or nobody."""
        return self._lineage.waits_since

    # The interface to the shell ---------------------------------------------------------------------------------------

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Handles an event; returns the effects to carry out, in order.

        Events of sessions that have ended are ignored. A Registered, Resumed or Reported that must not be raises
        `Refused`, and changes nothing.
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
            case AddressRefused():
                return self._address_refused(now, event)
            case DoorAnswered():
                return self._door_answered(now, event)
            case LeftJob():
                return self._leave(now, event)
            case MetOthers():
                return self._lineage.meet(now, event)
            case FinishedLine():
                return self._lineage.finish(now, event)
            case FinishStored():
                return self._lineage.finish_stored(now, event)
            case DrainAsked():
                return self._lineage.drain(now, event)
            case RestartAsked():
                return self._lineage.restart(now)
            case ViewStored():
                return self._lineage.view_stored(now, event.generation)
            case StoreFailed():
                return self._lineage.store_failed(now, event)

    def next_deadline(self) -> float:
        """When the next `Ticked` is due at the latest, infinity for never."""
        watches = (self._evidence.judge_at, self._leases.check_at)
        return min(*watches, self._barriers.next_deadline(), self._lineage.next_deadline())

    def find(self, process: Process) -> list[Session]:
        """The live sessions of a process."""
        return self.state.sessions.of(process)

    # Coming -----------------------------------------------------------------------------------------------------------

    def _register(self, now: float, event: Registered) -> list[Effect]:
        effects: list[Effect] = []
        self._departures.breaches.check(event.process)
        self._departures.check_replica(event.replica)
        for stale in admission.check(self.state, event):
            text = f"its place was taken over by {event.process.host} (pid {event.process.pid})"
            effects += self._departures.end(stale, Ending(text, orderly=False, lives=True), SessionEnded(text))
        effects += self._lineage.see_generation(now, event.generation_floor, event.settings.failure_timeout)
        seat_freed = self._came_back(now, event)
        effects += seat_freed
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
            versions=event.versions,
            replica=event.replica,
            position=event.position,
            launch=event.launch,
            came_back=bool(seat_freed),
        )
        self.state.sessions[session.member_id] = session
        self.state.last_arrival = now
        if event.launch is not None:
            self.state.launches.joined(now, event.launch)
        self._leases.began(session)
        effects.append(Welcome(session.member_id, session.settings.heartbeat_interval))
        if self.state.finished is not None:
            effects.append(Send(session.member_id, Finished(self.state.finished)))
        return effects + self._lineage.reconsider(now, newcomer=session)

    def _came_back(self, now: float, event: Registered) -> list[Effect]:
        """A process that registers anew is no silent member of the last view any more."""
        view = self.state.view
        ending = Ending("came back as a new member", orderly=False, lives=True)
        session = self.state.sessions.get(event.former_member_id)
        if session is not None and admission.was_this_member(event, session):
            return self._departures.lose(now, [(session, ending)])
        if view is None or not event.former_member_id:
            return []
        for rank, known in self.state.endings.items():
            if not known.sure and admission.was_this_member(event, view.seats[rank]):
                return self._departures.mark(rank, ending)
        return []

    def _resume(self, now: float, event: Resumed) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None or session.token_sha256 != event.token_sha256:
            raise SessionEnded(self._why_unknown(event))
        if not event.versions.cover(session.versions):
            raise BadRequest(f"the member speaks {session.versions} of the protocol, and says {event.versions} now")
        if superseded := self._lineage.see_generation(now, event.generation, session.settings.failure_timeout):
            return superseded + self._lineage.reconsider(now)  # this session is among those that have ended
        self.state.sessions.learn(session, event.versions)
        session.stream, session.stream_ended = event.stream, None
        session.heard = session.lease_from = now
        session.overdue_from = None
        self._leases.began(session)
        self._lineage.trust_stored_view()
        self._lineage.tell_again(session)  # what it was told may be lost with the old stream
        effects: list[Effect] = [Welcome(session.member_id, session.settings.heartbeat_interval)]
        if self.state.finished is not None:
            effects.append(Send(session.member_id, Finished(self.state.finished)))
        drain = [Send(session.member_id, Drain(session.draining))] if session.draining else []
        if session.standing is Standing.CANDIDATE:
            self.state.last_arrival = now
            return [*effects, *drain, *self._lineage.reconsider(now, newcomer=session)]
        view = self.state.view
        if session.standing is Standing.DISMISSED:
            return [*effects, Send(session.member_id, self._lineage.dismissal(session))]
        if view is not None and event.generation < session.generation == view.generation:
            formed = ViewFormed.of(view, rank_of(session))
            effects.append(Send(session.member_id, formed))  # it was lost with the old stream
        if session.verdict is not None:
            effects.append(Send(session.member_id, session.verdict))
        return [*effects, *drain, *self._lineage.reconsider(now)]

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
        effects = self._departures.judge_if_ripe(now) + self._departures.second_death(session)
        return effects + self._lineage.reconsider(now)

    def _exit_reported(self, now: float, event: ExitReported) -> list[Effect]:
        ending = Ending(event.how, orderly=False)
        effects = self._departures.lose(now, [(session, ending) for session in self.find(event.process)])
        for seat in self._seats_of(event.process):
            known = self.state.endings.get(seat.rank)
            if known is not None and not known.sure:
                effects += self._departures.mark(seat.rank, ending)  # it was only silent until now
        self._departures.find_astray(event.process, ending)
        if event.launch_id:
            self.state.launches.over(event.launch_id)
        return effects + self._lineage.reconsider(now)

    def _seats_of(self, process: Process) -> list[Seat]:
        """The seats of a process in the last view. All processes of a job may end at once: each is looked up."""
        if self._seated is not self.state.view:
            self._seated, self._seats = self.state.view, {}
            for seat in self._seated.seats if self._seated is not None else ():
                self._seats.setdefault((seat.process.host, seat.process.pid), []).append(seat)
        return [seat for seat in self._seats.get((process.host, process.pid), ()) if seat.process.is_same(process)]

    def _leave(self, now: float, event: LeftJob) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None:
            return []
        in_view = session.standing is Standing.IN_VIEW
        if in_view or session.standing is Standing.VOID:
            self.state.last_parting = now
        if not in_view:
            return self._departures.end(session, Ending("left the job", orderly=True), None) + self._lineage.reconsider(
                now
            )
        assert self.state.view is not None
        seat = self.state.view.seats[rank_of(session)]
        effects: list[Effect] = []
        if event.cause:
            # The others must hear its error, not that its links have ended.
            raised = ErrorReason.ERROR_REASON_PEER_RAISED
            text = f"{seat.label} raised {event.cause}"
            self._evidence.add(now, Report(seat.rank, raised, None, session.progress.operation, text))
            ending = Ending("left the job with an error", orderly=False)
            effects += self._departures.mark(seat.rank, ending)
            effects += self._departures.end(session, ending, None)
            effects += self._departures.void(now, self._evidence.judge(now, {}))
        else:
            ending = Ending("left the job", orderly=True)
            effects += self._departures.mark(seat.rank, ending)
            effects += self._departures.end(session, ending, None)
            effects += self._barriers.withdraw(seat)
            effects += self._departures.judge_if_ripe(now)
        return effects + self._lineage.reconsider(now)

    # What members say, and time ---------------------------------------------------------------------------------------

    def _report(self, now: float, event: Reported) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None:
            return []
        session.heard = session.lease_from = now
        report = of_view(event.report, session)
        if session.generation < event.generation <= session.last_generation:
            return []  # its line is over
        admission.check_report(session, event)
        if event.generation < session.generation:  # it has moved on since
            return []
        if session.verdict is not None:
            effects: list[Effect] = [Send(session.member_id, session.verdict)]
            parted = self._second_death(session, report) + self._second_word(session, report)
            return effects + parted + (self._lineage.reconsider(now) if parted else [])
        view = self.state.live
        if view is None or view.generation != session.generation:  # it was dismissed: its view is past
            return []
        if report.reason == ErrorReason.ERROR_REASON_TIMEOUT and all(s.has_met for s in self.state.present()):
            return []  # the members wait for more workers, and not for each other
        if report.accused is not None and report.accused >= len(view.seats):
            world = len(view.seats) // view.settings.replica_size
            raise BadRequest(f"a report that accuses rank {event.report.accused} in a world of {world}")
        if report.operation > session.progress.operation:  # newer than its last heartbeat
            session.progress = Progress(report.operation, now, inside=True)
        self._evidence.add(now, replace(report, reporter=rank_of(session)))
        return self._departures.judge_if_ripe(now) + self._lineage.reconsider(now)

    def _second_death(self, session: Session, report: Report) -> list[Effect]:
        """Evicts a member that dies after the verdict: a lost link counts then only if its stream has ended too."""
        view = self.state.view
        if view is None or view.generation != session.generation or report.accused is None:
            return []
        if report.reason != ErrorReason.ERROR_REASON_PEER_LOST or report.accused >= len(view.seats):
            return []
        other = self.state.session_of(report.accused)
        if other is None or other.stream is not None:
            return []
        return self._departures.evict([report.accused], "was cut off from others")

    def _second_word(self, session: Session, report: Report) -> list[Effect]:
        """Takes the word of another witness of the breach that the verdict names."""
        view = self.state.view
        if view is None or view.generation != session.generation or self.state.verdict is None:
            return []
        broke = ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL
        if report.reason != broke or self.state.verdict.reason != broke or (report.accused or 0) >= len(view.seats):
            return []
        self._departures.breaches.hear([replace(report, reporter=rank_of(session))])
        return self._departures.part_with_breakers()

    def _address_refused(self, now: float, event: AddressRefused) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None or session.stream is not None:
            return []
        how = "died: its session ended, and nobody listens at its address"
        return self._departures.lose(
            now, [(session, Ending(how, orderly=False, sure=False))]
        ) + self._lineage.reconsider(now)

    def _door_answered(self, now: float, event: DoorAnswered) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is not None and session.stream is not None:  # else its silence is counted from the stream's end
            session.lease_from = now
        return []

    def _heard(self, now: float, event: Heard) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is not None:
            session.heard = session.lease_from = now
            session.progress = event.progress
            if session.standing is Standing.IN_VIEW and event.progress.step:
                self.state.vouched_at = max(self.state.vouched_at, min(now, event.progress.step_at))
                self.state.reached = max(self.state.reached or 0, event.progress.step - 1)
        return []

    def _enter_barrier(self, now: float, event: BarrierEntered) -> list[Effect]:
        session = self.state.sessions.get(event.member_id)
        if session is None:
            return []
        session.heard = session.lease_from = now
        view = self.state.view
        of_view = view is not None and view.generation == session.generation
        if not of_view or event.generation != session.generation:
            where = f"generation {session.generation}" if session.generation else "no generation yet"
            text = f"barrier {event.name!r} is of generation {event.generation}, but the member is in {where}"
            failed = BarrierFailed(event.call, ErrorReason.ERROR_REASON_STALE_GENERATION, text)
            return [Send(event.member_id, failed)]
        if (verdict := session.verdict) is not None:
            failed = BarrierFailed(event.call, verdict.reason, verdict.text, verdict.culprits)
            return [Send(event.member_id, failed)]
        assert view is not None
        left = (view.seats[rank] for rank, ending in self.state.endings.items() if ending.orderly)
        return self._barriers.enter(now, view.seats[rank_of(session)], event, left)

    def _tick(self, now: float, slept: float) -> list[Effect]:
        self._leases.renew_after_stall(now, slept)
        self._stragglers.renew_after_stall(slept)
        self._evidence.renew_after_stall(slept)
        silent, unheard = self._leases.look(now)
        lapsed = [(session, Ending(how, orderly=False, sure=False)) for session, how in silent]
        effects: list[Effect] = [AskDoor(session.member_id, session.address) for session in unheard]
        effects += self._departures.lose(now, lapsed)
        effects += self._departures.judge_if_ripe(now)  # the gone explain links
        effects += self._barriers.expire(now, lambda rank: self._leases.whereabouts(now, rank))
        self._lineage.retry_storing(now)
        return effects + self._lineage.reconsider(now)
