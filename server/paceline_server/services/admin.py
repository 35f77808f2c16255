"""AdminService shows jobs to operators, and carries out their requests."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline_protocol.coordinator import DrainAsked, Membership, RestartAsked, Session, Standing, spares
from paceline_server import wire
from paceline_server._grpc import aio
from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import LimitMet, NotFound
from paceline_server.keeper import Job
from pacelinepb.v1 import admin_pb2 as pb
from pacelinepb.v1 import session_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceServicer

__all__ = ["AdminHandlers"]

_Context = aio.ServicerContext[Any, Any]


class AdminHandlers(AdminServiceServicer):
    """Handlers of pacelinepb.v1.AdminService.

    Args:
        dispatcher: the jobs.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def ListJobs(self, request: pb.ListJobsRequest, context: _Context) -> pb.ListJobsResponse:
        """Returns all jobs, sorted by name."""
        now = asyncio.get_running_loop().time()
        found = [self._job(name) for name in self._dispatcher.names()]
        return pb.ListJobsResponse(jobs=[_summary(now, job.membership) for job in found])

    async def GetJob(self, request: pb.GetJobRequest, context: _Context) -> pb.GetJobResponse:
        """Returns one job with its members."""
        job = self._job(request.job)
        now = asyncio.get_running_loop().time()
        state = job.membership.state
        concerned = state.concerned()
        in_view = sorted((s for s in concerned if s.rank is not None), key=lambda s: s.rank or 0)
        waiting, spare = [s for s in concerned if s.standing is Standing.WAITING], spares(state)
        return pb.GetJobResponse(
            summary=_summary(now, job.membership),
            settings=wire.write_settings(concerned[0].settings) if concerned else None,
            members=[_member(now, session, is_spare=session in spare) for session in in_view + waiting],
            verdict=wire.write_verdict(state.verdict) if state.verdict is not None else None,
        )

    async def DrainMembers(self, request: pb.DrainMembersRequest, context: _Context) -> pb.DrainMembersResponse:
        """Asks members to leave; all of them if the request names none."""
        job = self._job(request.job)
        sessions = job.membership.state.concerned()
        chosen = sessions
        if request.members:
            if len(request.members) > (most := self._dispatcher.settings.max_job_sessions):
                raise LimitMet(f"a DrainMembers names at most {most:,} members, not {len(request.members):,}")
            by_name = {str(s.rank): s for s in sessions if s.standing is Standing.IN_VIEW}
            by_name |= {s.member_id: s for s in sessions}
            unknown = [name for name in request.members if name not in by_name]
            if unknown:
                raise NotFound(
                    f"job {request.job!r} has no member {', '.join(unknown)}; nobody was told anything: "
                    f"paceline status {request.job} shows its members"
                )
            chosen = [by_name[name] for name in request.members]
        ids = tuple(dict.fromkeys(session.member_id for session in chosen))  # a rank and an id may name the same one
        self._dispatcher.apply(job, DrainAsked(ids, "an operator asked for it (paceline drain)"))
        return pb.DrainMembersResponse(member_ids=ids)

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

    def _job(self, name: str) -> Job:
        job = self._dispatcher.find(name)
        if job is None:
            raise NotFound(f"there is no job {name!r}; paceline status shows those that there are")
        return job


def _summary(now: float, membership: Membership) -> pb.JobSummary:
    state = membership.state
    if state.finished is not None:
        phase = pb.JOB_PHASE_FINISHED
    elif state.live is not None:
        phase = pb.JOB_PHASE_RUNNING
    elif state.view is not None:
        phase = pb.JOB_PHASE_VOID
    else:
        phase = pb.JOB_PHASE_WAITING
    return pb.JobSummary(
        name=state.name,
        phase=phase,
        generation=state.generation if state.view is None else state.view.generation,
        world_size=len(state.live.seats) if state.live is not None else 0,
        waiting=sum(session.standing is Standing.WAITING for session in state.sessions.values()),
        reason=membership.decision.reason,
        waited=None if membership.waits_since is None else wire.to_duration(now - membership.waits_since),
    )


def _member(now: float, session: Session, *, is_spare: bool) -> pb.MemberStatus:
    member = session_pb2.Member(
        member_id=session.member_id,
        rank=session.rank or 0,
        process=wire.write_process(session.process),
        address=session.address,
    )
    return pb.MemberStatus(
        member=member,
        in_view=session.rank is not None,
        standing=_standing(now, session, is_spare=is_spare),
        attached=session.stream is not None,
        silent=wire.to_duration(now - session.heard),
        progress=wire.write_progress(now, session.progress),
    )


def _standing(now: float, session: Session, *, is_spare: bool) -> str:
    """Describes the state of a session in a word or two, for people."""
    if session.stream is None or now - session.heard > session.settings.failure_timeout:
        return "silent"
    if session.standing is Standing.DISMISSED or (session.met is not None and session.met.leaving):
        return "leaving"
    if session.standing is Standing.WAITING:
        return "waiting" if session.met is None else "spare" if is_spare else "ready to join"
    if session.met is not None:
        return "met" if session.met.tag is None else f"met at step {session.met.tag.step}"
    return "training" if session.standing is Standing.IN_VIEW else "parked"
