"""AdminService: what an operator sees. Reads the state, changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline_server import wire
from paceline_server._grpc import aio
from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import NotFound
from paceline_server.membership import Membership
from paceline_server.model import Session, Standing
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
        self._jobs = dispatcher.jobs

    async def ListJobs(self, request: pb.ListJobsRequest, context: _Context) -> pb.ListJobsResponse:
        """All jobs by name."""
        return pb.ListJobsResponse(jobs=[_summary(self._jobs[name].membership) for name in sorted(self._jobs)])

    async def GetJob(self, request: pb.GetJobRequest, context: _Context) -> pb.GetJobResponse:
        """One job with its members."""
        job = self._jobs.get(request.job)
        if job is None:
            raise NotFound(f"there is no job {request.job!r}")
        now = asyncio.get_running_loop().time()
        state = job.membership.state
        concerned = state.concerned()
        in_view = sorted((s for s in concerned if s.standing is Standing.IN_VIEW), key=lambda s: s.rank or 0)
        waiting = [s for s in concerned if s.standing is Standing.WAITING]
        return pb.GetJobResponse(
            summary=_summary(job.membership),
            settings=wire.write_settings(concerned[0].settings) if concerned else None,
            members=[_member(now, session) for session in in_view + waiting],
            verdict=wire.write_verdict(state.verdict) if state.verdict is not None else None,
        )


def _summary(membership: Membership) -> pb.JobSummary:
    state = membership.state
    if state.live is not None:
        phase = pb.JOB_PHASE_RUNNING
    elif state.view is not None:
        phase = pb.JOB_PHASE_VOID
    else:
        phase = pb.JOB_PHASE_WAITING
    return pb.JobSummary(
        name=state.name,
        phase=phase,
        generation=state.generation,
        world_size=len(state.live.seats) if state.live is not None else 0,
        waiting=sum(session.standing is Standing.WAITING for session in state.sessions.values()),
        reason=membership.decision.reason,
    )


def _member(now: float, session: Session) -> pb.MemberStatus:
    member = session_pb2.Member(
        member_id=session.member_id,
        rank=session.rank or 0,
        process=wire.write_process(session.process),
        address=session.address,
    )
    return pb.MemberStatus(
        member=member,
        in_view=session.standing is Standing.IN_VIEW,
        attached=session.stream is not None,
        silent=wire.to_duration(now - session.heard),
        progress=wire.write_progress(now, session.progress),
    )
