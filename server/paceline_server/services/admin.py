"""AdminService shows jobs to operators, and carries out their requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from paceline_protocol.coordinator import DrainAsked, JobState, Membership, RestartAsked, Session, Standing, spares
from paceline_protocol.translation import write_process, write_verdict
from paceline_server import wire
from paceline_server._grpc import aio
from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import BadRequest, LimitMet, NotFound
from paceline_server.keeper import Job
from paceline_server.observatory import JobEvent
from paceline_server.tally import Gone, Tally
from pacelinepb import MOST_PIDS
from pacelinepb.v1 import admin_pb2 as pb
from pacelinepb.v1 import session_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceServicer

T = TypeVar("T")

_Context = aio.ServicerContext[Any, Any]

_MOST_PATIENCE_S = 60.0

_MOST_SUM = (1 << 64) - 1
"""The most that a message can say. Members choose their numbers, and the sum of one job's must not fail all others."""

AT_ONCE = 200
"""Members or jobs that are written into an answer before other calls have a turn: 5 to 8 ms."""

_ALL = ""
"""Stands for the list of all jobs where other answers have the name of a job."""

MOST_LISTED = 1_000
"""The most events in one answer."""


@dataclass(frozen=True, slots=True)
class AdminLimits:
    """Limits of answers to operators."""

    longest_ask_s: float = 120.0
    """Seconds for members to answer a question, whatever the operator's patience with a silent one."""

    most_unread_s: float = 60.0
    """Seconds after `longest_ask_s` for an operator to read what is left."""

    kept_s: float = 200e-6
    """Seconds, for each member or job of an answer with more than `AT_ONCE`, for which the answer is given to others
    who ask. To write it takes 25 us for a member, and up to 40 us for a job, so at most a fifth of a core goes into
    this."""


class AdminHandlers(AdminServiceServicer):
    """Handlers of pacelinepb.v1.AdminService."""

    def __init__(self, dispatcher: Dispatcher, limits: AdminLimits = AdminLimits()) -> None:
        self._dispatcher = dispatcher
        self._limits = limits
        self._answers: dict[str, asyncio.Task[Any]] = {}  # the long ones of the last moment
        self._giving = asyncio.Lock()

    async def ListJobs(self, request: pb.ListJobsRequest, context: _Context | None = None) -> pb.ListJobsResponse:
        """Returns all jobs, sorted by name; an answer that others have just been given, if there are many jobs."""
        is_given = _ALL in self._answers and not self._dispatcher.draining
        names = [] if is_given else self._dispatcher.names()
        return await self._answer(_ALL, len(names), lambda: self._list(names))

    async def GetJob(self, request: pb.GetJobRequest, context: _Context | None = None) -> pb.GetJobResponse:
        """Returns one job with its members; an answer that others have just been given, if there are many members."""
        membership = self._job(request.job).membership
        return await self._answer(request.job, len(membership.state.sessions), lambda: self._detail(membership))

    async def _answer(self, key: str, count: int, write: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Writes an answer with so many members or jobs, or gives the long one that others have just been given.

        A caller that asks while the coordinator stops wants to know how the job has ended.
        """
        if self._dispatcher.draining:
            return await write()
        answer: asyncio.Task[T] | None = self._answers.get(key)
        if answer is None:
            if count <= AT_ONCE:
                return await write()
            answer = self._answers[key] = asyncio.create_task(write())
            loop = asyncio.get_running_loop()
            answer.add_done_callback(lambda _: loop.call_later(self._limits.kept_s * count, self._answers.pop, key))
        await asyncio.shield(answer)
        await self._turn()
        return answer.result()

    async def _turn(self) -> None:
        """Lets one long answer leave in each round of the loop: many callers may wait for one, and grpc copies it."""
        async with self._giving:
            await asyncio.sleep(0)

    async def _list(self, names: list[str]) -> pb.ListJobsResponse:
        answer = pb.ListJobsResponse(leader=self._leader())
        for first in range(0, len(names), AT_ONCE):
            if first:
                await asyncio.sleep(0)
            found = (self._dispatcher.find(name) for name in names[first : first + AT_ONCE])
            answer.jobs.extend(self._summary(job.membership) for job in found if job is not None)
        return answer

    async def _detail(self, membership: Membership) -> pb.GetJobResponse:
        now, observatory = self._now(), self._dispatcher.observatory
        state = membership.state
        tally = observatory.tally(now, state.name)
        concerned = state.concerned()
        in_view = state.present() if state.view is not None else []  # a void view's, too, until they leave
        waiting, spare = [s for s in concerned if s.standing is Standing.CANDIDATE], set(spares(state))
        summary = self._summary(membership)
        answer = pb.GetJobResponse(
            summary=summary,
            settings=wire.write_settings(concerned[0].settings) if concerned else None,
            verdict=write_verdict(state.verdict) if state.verdict is not None else None,
            gone=[_gone(now, each) for each in tally.gone_lately(now)] if tally is not None else (),
            totals=summary.totals,
            events=map(_event, observatory.recent(state.name)),
            leader=self._leader(),
        )
        members = [*in_view, *waiting]
        for first in range(0, len(members), AT_ONCE):
            if first:
                await asyncio.sleep(0)
            some = members[first : first + AT_ONCE]
            answer.members.extend(_member(now, each, tally, is_spare=each in spare) for each in some)
        return answer

    async def ListEvents(self, request: pb.ListEventsRequest, context: _Context | None = None) -> pb.ListEventsResponse:
        """Returns what has happened."""
        most = min(request.most or MOST_LISTED, MOST_LISTED)
        if most > AT_ONCE:
            await self._turn()
        found, looked = self._dispatcher.observatory.events(request.job, request.after, most)
        return pb.ListEventsResponse(events=map(_event, found), next=looked)

    async def DrainMembers(
        self, request: pb.DrainMembersRequest, context: _Context | None = None
    ) -> pb.DrainMembersResponse:
        """Asks members to leave; all of them if the request names none."""
        job = self._job(request.job)
        sessions = job.membership.state.concerned()
        ids = tuple(session.member_id for session in self._chosen(job, sessions, request.members, "DrainMembers"))
        self._dispatcher.apply(job, DrainAsked(ids, "an operator asked for it (paceline drain)"))
        return pb.DrainMembersResponse(member_ids=ids)

    async def AskMembers(self, request: pb.AskMembersRequest, context: _Context) -> None:  # type: ignore[override]  # writes to the context
        """Asks members what they are doing, and passes on what they answer."""
        limits = self._limits
        try:
            async with (
                asyncio.timeout(limits.longest_ask_s + limits.most_unread_s),
                aclosing(self.answers(request)) as answers,
            ):
                async for answer in answers:
                    await context.write(answer)
        except TimeoutError:
            raise LimitMet("the members' answers were not read in time: ask fewer members at a time") from None

    async def answers(
        self,
        request: pb.AskMembersRequest,
        most: int | None = None,
        longest: float | None = None,
        pids_of: Mapping[str, Sequence[int]] | None = None,
    ) -> AsyncGenerator[pb.AskMembersResponse, None]:
        """Asks members, and yields what each answers; refuses to ask more than `most`.

        `longest` and `pids_of` are as in `Questions.ask`.
        """
        job = self._job(request.job)
        everyone = list(job.membership.state.sessions.values())  # also those whose generation has failed
        sessions = self._chosen(job, everyone, request.members, "AskMembers")
        if most is not None and len(sessions) > most:
            raise BadRequest(
                f"at most {most} members are asked over HTTP at a time, not {len(sessions)}: name one of them, or use "
                "paceline debug"
            )
        ranks_now = {each.rank for each in everyone if each.standing is Standing.IN_VIEW}
        asked = session_pb2.Asked(what=request.what, pids=request.pids)
        patience = 1.0
        if request.HasField("patience"):
            patience = min(wire.from_duration(request.patience, "patience"), _MOST_PATIENCE_S)
        if request.what not in session_pb2.Question.values() or not request.what:
            raise BadRequest("AskMembers needs a question that this coordinator knows")
        if len(request.pids) > MOST_PIDS:
            raise LimitMet(f"an AskMembers request names at most {MOST_PIDS} processes, not {len(request.pids)}")
        by_id = {session.member_id: session for session in sessions}
        clock, wall = asyncio.get_running_loop().time(), time.time()
        longest = self._limits.longest_ask_s if longest is None else longest
        answers = self._dispatcher.questions.ask(request.job, asked, list(by_id), patience, longest, pids_of)
        async with aclosing(answers):
            async for answer in answers:
                session = by_id[answer.member_id]
                response = pb.AskMembersResponse(
                    member=_identity(session),
                    in_view=session.rank is not None
                    and (session.standing is Standing.IN_VIEW or session.rank not in ranks_now),
                    data=answer.data or b"",
                    trouble=answer.trouble,
                )
                response.asked_at.FromNanoseconds(round((wall + answer.asked_at - clock) * 1e9))
                response.answered_at.FromNanoseconds(round((wall + answer.answered_at - clock) * 1e9))
                yield response

    async def RestartJob(self, request: pb.RestartJobRequest, context: _Context) -> pb.RestartJobResponse:
        """Ends a job's line, because the operator declares its silent members dead."""
        job = self._job(request.job)
        state = job.membership.state
        there = state.present() if state.view is not None else []
        silent = [rank for rank, ending in state.endings.items() if not ending.sure]
        seats = state.view.seats if state.view is not None else ()
        members = [seats[rank].label for rank in sorted({*silent, *(s.rank for s in there if s.rank is not None)})]
        self._dispatcher.apply(job, RestartAsked())
        return pb.RestartJobResponse(members=members)

    async def ForgetJob(self, request: pb.ForgetJobRequest, context: _Context) -> pb.ForgetJobResponse:
        """Removes a job that is over."""
        await self._dispatcher.forget(request.job)
        return pb.ForgetJobResponse()

    def _chosen(self, job: Job, sessions: list[Session], names: Sequence[str], call: str) -> list[Session]:
        """Returns those sessions that a request names by rank or id, each once; all of them if it names none."""
        if not names:
            return sessions
        if len(names) > (most := self._dispatcher.settings.max_job_sessions):
            raise LimitMet(f"a {call} request names at most {most:,} members, not {len(names):,}")
        by_name: dict[str, list[Session]] = {}
        for session in sessions:
            by_name[session.member_id] = [session]
            if session.standing is Standing.IN_VIEW and session.rank is not None:  # of a replica: all its ranks
                by_name.setdefault(str(session.rank // session.settings.replica_size), []).append(session)
        unknown = [name for name in names if name not in by_name]
        if unknown:
            job_name = job.membership.state.name
            raise NotFound(
                f"job {job_name!r} has no member {', '.join(unknown)}; no member was asked: "
                f"paceline status {job_name} lists the members"
            )
        chosen = (session for name in names for session in by_name[name])
        return list({session.member_id: session for session in chosen}.values())  # a rank and an id may name the same

    def _job(self, name: str) -> Job:
        job = self._dispatcher.find(name)
        if job is None:
            raise NotFound(f"there is no job {name!r}; paceline status lists the jobs")
        return job

    def _summary(self, membership: Membership) -> pb.JobSummary:
        now, state = self._now(), membership.state
        concerned = state.concerned()
        tally = self._dispatcher.observatory.tally(now, state.name)
        stall = None if tally is None else tally.reports.stall(now, state)
        slow = "" if tally is None or stall is not None else tally.reports.slow(state)
        return pb.JobSummary(
            name=state.name,
            phase=phase_of(state),
            generation=state.generation if state.view is None else state.view.generation,
            world_size=len(state.live.seats) if state.live is not None else 0,
            waiting=sum(session.standing is Standing.CANDIDATE for session in state.sessions.values()),
            reason=f"{membership.decision.reason}; {slow}" if slow else membership.decision.reason,
            waited=None if membership.waits_since is None else wire.to_duration(now - membership.waits_since),
            totals=_totals(now, tally),
            min_workers=concerned[0].settings.min_workers if concerned else 0,
            max_workers=concerned[0].settings.max_workers if concerned else 0,
            replica_size=concerned[0].settings.replica_size if concerned else 1,
            stalled=None if stall is None else wire.to_duration(stall[0]),
            stall="" if stall is None else stall[1],
            total=0 if tally is None else tally.reports.total,
        )

    def _leader(self) -> pb.Leader | None:
        settings, epoch = self._dispatcher.settings, self._dispatcher.epoch
        return pb.Leader(address=settings.reached_at, epoch=epoch) if epoch else None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def phase_of(state: JobState) -> pb.JobPhase.ValueType:
    """Returns where a job stands."""
    if state.finished is not None:
        return pb.JOB_PHASE_FINISHED
    if state.live is not None:
        return pb.JOB_PHASE_RUNNING
    return pb.JOB_PHASE_VOID if state.view is not None else pb.JOB_PHASE_WAITING


def _totals(now: float, tally: Tally | None) -> pb.JobTotals:
    if tally is None:
        return pb.JobTotals()
    return pb.JobTotals(
        committed=min(tally.committed, _MOST_SUM),
        undone=min(tally.undone, _MOST_SUM),
        samples=min(tally.samples, _MOST_SUM),
        generations=tally.generations.total(),
        members_lost=tally.members_lost,
        step=tally.step,
        steps_per_second=tally.steps_per_second(now),
        goodput=tally.goodput(now),
        sent_bytes={kind: min(size, _MOST_SUM) for kind, size in tally.sent_bytes.items()},
        operations=min(tally.reports.operations, _MOST_SUM),
        operations_per_second=tally.reports.operations_per_second(now),
        logged=tally.reports.logged(now),
        checkpoint_step=tally.checkpoint_step,
        checkpoint_ago=None if tally.checkpoint_at is None else wire.to_duration(now - tally.checkpoint_at),
    )


def _event(event: JobEvent) -> pb.JobEvent:
    at = Timestamp(seconds=math.floor(event.at), nanos=round(event.at % 1 * 1000) % 1000 * 1_000_000)
    return pb.JobEvent(
        number=event.number, at=at, job=event.job, kind=event.kind, generation=event.generation, text=event.text
    )


def _gone(now: float, gone: Gone) -> pb.GoneMember:
    return pb.GoneMember(
        member=_identity(gone.session),
        ago=wire.to_duration(now - gone.at),
        how=gone.how,
        in_view=gone.session.rank is not None,
        output=gone.output,
    )


def _identity(session: Session) -> session_pb2.Member:
    return session_pb2.Member(
        member_id=session.member_id,
        rank=session.rank or 0,
        process=write_process(session.process),
        address=session.address,
    )


def _member(now: float, session: Session, tally: Tally | None, *, is_spare: bool) -> pb.MemberStatus:
    counters = tally.counters_of(session.member_id) if tally is not None else None
    return pb.MemberStatus(
        member=_identity(session),
        in_view=session.rank is not None,
        standing=standing_of(now, session, is_spare=is_spare),
        attached=session.stream is not None,
        silent=wire.to_duration(now - session.heard),
        progress=wire.write_progress(now, session.progress, counters),
    )


def standing_of(now: float, session: Session, *, is_spare: bool) -> str:
    """Describes the state of a session in a word or two, for people."""
    if session.stream is None or now - session.heard > session.settings.failure_timeout:
        return "silent"
    if session.standing is Standing.DISMISSED or (session.met is not None and session.met.leaving):
        return "leaving"
    if session.standing is Standing.CANDIDATE:
        if session.met is None:  # one that was in a generation has to stop its step first
            return "not stopped" if session.generation_floor else "waiting"
        return "spare" if is_spare else "ready to join"
    if session.met is not None:
        return "met" if session.met.tag is None else f"met at step {session.met.tag.step}"
    return "training" if session.standing is Standing.IN_VIEW else "parked"
