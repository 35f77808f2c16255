"""Calls a coordinator from outside any job: lists jobs and members, and sends an operator's orders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from paceline._grpc import aio, grpc
from paceline._loop import loop_thread
from paceline._rpc import CHANNEL_OPTIONS, error_from_status
from paceline._session.connection import check_tls
from paceline.cli.access import own_credentials
from paceline.credentials import Credentials
from paceline.errors import CoordinatorUnreachable, LimitExceeded
from pacelinepb.pieces import MESSAGE_BYTES
from pacelinepb.v1.admin_pb2 import (
    DrainMembersRequest,
    ForgetJobRequest,
    GetJobRequest,
    GetJobResponse,
    JobSummary,
    ListJobsRequest,
    MemberStatus,
    RestartJobRequest,
)
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.session_pb2 import JobSettings

__all__ = [
    "drain",
    "forget",
    "get_job",
    "in_order",
    "is_heard",
    "label",
    "list_jobs",
    "restart",
    "seconds",
    "stragglers",
]

_HEARTBEATS = 6
"""Heartbeats in one `failure_timeout`."""

T = TypeVar("T")

_PAUSE_S = 0.2
"""Seconds between two tries; gRPC's connection attempts have a backoff of their own."""


def seconds(duration: Duration) -> float:
    """Converts a duration to seconds."""
    return duration.ToNanoseconds() / 1e9


def label(status: MemberStatus) -> str:
    """Names a member as sentences do: its rank or member id, host and process id."""
    process = status.member.process
    name = f"rank {status.member.rank}" if status.in_view else f"member {status.member.member_id}"
    return f"{name} ({process.host}, pid {process.pid})"


def is_heard(status: MemberStatus, settings: JobSettings) -> bool:
    """True if the member is connected and has sent something within `failure_timeout`.

    Its connection alone proves nothing: a host may vanish without closing it.
    """
    return status.attached and seconds(status.silent) < seconds(settings.failure_timeout)


def in_order(members: Sequence[MemberStatus]) -> list[MemberStatus]:
    """Sorts silent members first, because they need attention; each part keeps its order: by rank, then by arrival."""
    return sorted(members, key=lambda status: status.attached and status.standing != "silent")


def stragglers(detail: GetJobResponse) -> dict[str, str]:
    """Finds the members that hold the others up; returns a sentence for each, by member id.

    Members send heartbeats a few times a second, at different moments, and may run thousands of operations in a second.
    So a lower operation number alone says nothing. A member is behind if others have waited inside a later operation
    for more than one heartbeat interval, and it has sent something since they entered it. A member that is not
    connected is silent, not slow.
    """
    there = [status for status in detail.members if status.in_view and status.attached]
    interval = seconds(detail.settings.failure_timeout) / _HEARTBEATS
    waiting = [status for status in there if status.progress.inside]
    if not waiting:
        return {}
    ahead = max(status.progress.operation for status in waiting)
    entered = max(seconds(status.progress.since) for status in waiting if status.progress.operation == ahead)
    if entered < interval:
        return {}
    return {
        status.member.member_id: _sentence(status, ahead)
        for status in there
        if status.progress.operation < ahead and seconds(status.silent) < entered
    }


def _sentence(status: MemberStatus, ahead: int) -> str:
    progress = status.progress
    if not progress.operation:
        return f"straggler: in no operation yet, others are in {ahead}"
    where = "in" if progress.inside else "out of"
    return f"straggler: {seconds(progress.since):.1f} s {where} operation {progress.operation}, others are in {ahead}"


def list_jobs(coordinator: str, timeout: float) -> list[JobSummary]:
    """Returns all jobs, sorted by name.

    Args:
        coordinator: its address, "host:port".
        timeout: seconds to try for.

    Raises:
        CoordinatorUnreachable: nothing answers at the address, or no coordinator does.
        NotAuthenticated, NotPermitted: the coordinator requires a token, or another one.
    """

    async def call(channel: aio.Channel, left: float) -> list[JobSummary]:
        return list((await AdminServiceStub(channel).ListJobs(ListJobsRequest(), timeout=left)).jobs)

    return _run(coordinator, timeout, call)


def get_job(coordinator: str, job: str, timeout: float) -> GetJobResponse:
    """Returns one job with its members; arguments as for `list_jobs`.

    Raises:
        PacelineError: there is no such job.
        CoordinatorUnreachable: nothing answers at the address, or no coordinator does.
    """

    async def call(channel: aio.Channel, left: float) -> GetJobResponse:
        return await AdminServiceStub(channel).GetJob(GetJobRequest(job=job), timeout=left)

    return _run(coordinator, timeout, call)


def drain(coordinator: str, job: str, members: Sequence[str], timeout: float) -> list[str]:
    """Tells members to leave at their next step boundary.

    Args:
        coordinator: its address.
        job: name of the job.
        members: ranks in the current view, or member ids; empty for all.
        timeout: seconds to try for.

    Returns:
        The ids of the members that were told.

    Raises:
        PacelineError: there is no such job or member.
        LimitExceeded: the names do not fit into one request, which holds about 700 member ids.
        CoordinatorUnreachable: nothing answers at the address, or no coordinator does.
    """
    request = DrainMembersRequest(job=job, members=members)
    if request.ByteSize() > MESSAGE_BYTES:
        raise LimitExceeded(f"{len(members)} names do not fit into one request: name fewer at a time, or all by --all")

    async def call(channel: aio.Channel, left: float) -> list[str]:
        return list((await AdminServiceStub(channel).DrainMembers(request, timeout=left)).member_ids)

    return _run(coordinator, timeout, call)


def restart(coordinator: str, job: str, timeout: float) -> list[str]:
    """Declares the members of a job's last generation dead; arguments as for `list_jobs`.

    Returns:
        The members that were declared dead, as text for people.

    Raises:
        PacelineError: there is no such job.
        CoordinatorUnreachable: nothing answers at the address, or no coordinator does.
    """

    async def call(channel: aio.Channel, left: float) -> list[str]:
        return list((await AdminServiceStub(channel).RestartJob(RestartJobRequest(job=job), timeout=left)).members)

    return _run(coordinator, timeout, call)


def forget(coordinator: str, job: str, timeout: float) -> None:
    """Removes a job that is over; arguments as for `list_jobs`.

    Raises:
        PacelineError: there is no such job, or it is not over.
        CoordinatorUnreachable: nothing answers at the address, or no coordinator does.
    """

    async def call(channel: aio.Channel, left: float) -> None:
        await AdminServiceStub(channel).ForgetJob(ForgetJobRequest(job=job), timeout=left)

    _run(coordinator, timeout, call)


def _run(address: str, timeout: float, call: Callable[[aio.Channel, float], Awaitable[T]]) -> T:
    return loop_thread().run(_ask(address, timeout, own_credentials(address), call))


async def _ask(
    address: str, timeout: float, credentials: Credentials, call: Callable[[aio.Channel, float], Awaitable[T]]
) -> T:
    """Retries until the coordinator answers or the time is up, because a coordinator that restarts is away briefly."""
    start = time.monotonic()
    attempt = 0
    async with credentials.coordinator_channel(address, CHANNEL_OPTIONS) as channel:
        while True:
            left = timeout - (time.monotonic() - start)
            try:
                return await call(channel, left)
            except aio.AioRpcError as error:
                spent = time.monotonic() - start
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise error_from_status(error, f"the coordinator at {address}") from None
                if attempt & (attempt - 1) == 0:  # 0, 1, 2, 4, 8...: it may come up later, with a wrong certificate
                    await check_tls(address, credentials.files, timeout - spent)
                attempt += 1
                if spent + _PAUSE_S >= timeout:
                    raise CoordinatorUnreachable(
                        f"no coordinator answers at {address} (tried for {spent:.1f} s): {error.details()}"
                    ) from None
            await asyncio.sleep(_PAUSE_S)
