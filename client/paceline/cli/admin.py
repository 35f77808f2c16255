"""Calls to a coordinator from outside any job: what jobs there are, who is in them, and what an operator asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from paceline._grpc import aio, grpc
from paceline._loop import loop_thread
from paceline._rpc import CHANNEL_OPTIONS, error_from_status
from paceline.cli.credentials import own_credentials
from paceline.credentials import Credentials
from paceline.errors import CoordinatorUnreachable
from paceline.session.handshake import check_tls
from pacelinepb.v1.admin_pb2 import (
    DrainMembersRequest,
    ForgetJobRequest,
    GetJobRequest,
    GetJobResponse,
    JobSummary,
    ListJobsRequest,
    RestartJobRequest,
)
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub

__all__ = ["drain", "forget", "get_job", "list_jobs", "restart"]

T = TypeVar("T")

_PAUSE_S = 0.2
"""Between two tries; gRPC's own connection attempts have their own backoff."""


def list_jobs(coordinator: str, timeout: float) -> list[JobSummary]:
    """All jobs, by name.

    Args:
        coordinator: its address, "host:port".
        timeout: seconds to try for.

    Raises:
        CoordinatorUnreachable: nobody, or no coordinator, answers.
        NotAuthenticated, NotPermitted: it wants a token, or another one.
    """

    async def call(channel: aio.Channel, left: float) -> list[JobSummary]:
        return list((await AdminServiceStub(channel).ListJobs(ListJobsRequest(), timeout=left)).jobs)

    return _run(coordinator, timeout, call)


def get_job(coordinator: str, job: str, timeout: float) -> GetJobResponse:
    """One job with its members; arguments as for `list_jobs`.

    Raises:
        PacelineError: there is no such job.
        CoordinatorUnreachable: nobody, or no coordinator, answers.
    """

    async def call(channel: aio.Channel, left: float) -> GetJobResponse:
        return await AdminServiceStub(channel).GetJob(GetJobRequest(job=job), timeout=left)

    return _run(coordinator, timeout, call)


def drain(coordinator: str, job: str, members: Sequence[str], timeout: float) -> list[str]:
    """Has members leave at their next step boundary.

    Args:
        coordinator: its address.
        job: name of the job.
        members: ranks in the current view, or member ids; empty for all.
        timeout: seconds to try for.

    Returns:
        The ids of those who were told.

    Raises:
        PacelineError: there is no such job or member.
        CoordinatorUnreachable: nobody, or no coordinator, answers.
    """
    request = DrainMembersRequest(job=job, members=members)

    async def call(channel: aio.Channel, left: float) -> list[str]:
        return list((await AdminServiceStub(channel).DrainMembers(request, timeout=left)).member_ids)

    return _run(coordinator, timeout, call)


def restart(coordinator: str, job: str, timeout: float) -> list[str]:
    """Swears that the members of a job's last generation are dead; arguments as for `list_jobs`.

    Returns:
        Who was taken for dead, for people.

    Raises:
        PacelineError: there is no such job.
        CoordinatorUnreachable: nobody, or no coordinator, answers.
    """

    async def call(channel: aio.Channel, left: float) -> list[str]:
        return list((await AdminServiceStub(channel).RestartJob(RestartJobRequest(job=job), timeout=left)).members)

    return _run(coordinator, timeout, call)


def forget(coordinator: str, job: str, timeout: float) -> None:
    """Removes a job that is over; arguments as for `list_jobs`.

    Raises:
        PacelineError: there is no such job, or it is not over.
        CoordinatorUnreachable: nobody, or no coordinator, answers.
    """

    async def call(channel: aio.Channel, left: float) -> None:
        await AdminServiceStub(channel).ForgetJob(ForgetJobRequest(job=job), timeout=left)

    _run(coordinator, timeout, call)


def _run(address: str, timeout: float, call: Callable[[aio.Channel, float], Awaitable[T]]) -> T:
    return loop_thread().run(_ask(address, timeout, own_credentials(address), call))


async def _ask(
    address: str, timeout: float, credentials: Credentials, call: Callable[[aio.Channel, float], Awaitable[T]]
) -> T:
    """Asks until there is an answer or the time is up: a coordinator that restarts is away for a moment only."""
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
                if attempt & (attempt - 1) == 0:  # 0, 1, 2, 4, 8...: it may come up with a wrong certificate later
                    await check_tls(address, credentials.files, timeout - spent)
                attempt += 1
                if spent + _PAUSE_S >= timeout:
                    raise CoordinatorUnreachable(
                        f"no coordinator answers at {address} (tried for {spent:.1f} s): {error.details()}"
                    ) from None
            await asyncio.sleep(_PAUSE_S)
