"""Calls a coordinator about a job from outside it: who its members are, and the order to leave."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from paceline._base.addresses import CoordinatorAddresses
from paceline._base.rpc import CHANNEL_OPTIONS, aio, error_from_status, grpc, leader_named_by
from paceline._base.waits import loop_thread
from paceline._session.connection import check_tls
from paceline.errors import LimitExceeded
from paceline.launch._own_coordinator import own_credentials
from pacelinepb.pieces import MESSAGE_BYTES
from pacelinepb.v1.admin_pb2 import (
    DrainMembersRequest,
    GetJobRequest,
    GetJobResponse,
    JobSummary,
    ListJobsRequest,
    ListJobsResponse,
    MemberStatus,
)
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub

T = TypeVar("T")

AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses of a call that no coordinator has answered."""


async def all_jobs(channel: aio.Channel, left: float) -> ListJobsResponse:
    """Asks for all jobs, within so many seconds."""
    return await AdminServiceStub(channel).ListJobs(ListJobsRequest(), timeout=left)


async def one_job(name: str, channel: aio.Channel, left: float) -> GetJobResponse:
    """Asks for one job with its members, within so many seconds."""
    return await AdminServiceStub(channel).GetJob(GetJobRequest(job=name), timeout=left)


def drain_call(job: str, members: Sequence[str]) -> Callable[[aio.Channel, float], Awaitable[list[str]]]:
    """Returns the call that tells members to leave, all if none is named; it returns the ids of those that were told.

    Raises:
        LimitExceeded: the names do not fit into one request, which holds about 700 member ids.
    """
    request = DrainMembersRequest(job=job, members=members)
    if request.ByteSize() > MESSAGE_BYTES:
        raise LimitExceeded(f"{len(members)} names do not fit into one request: name fewer at a time, or use --all")

    async def call(channel: aio.Channel, left: float) -> list[str]:
        return list((await AdminServiceStub(channel).DrainMembers(request, timeout=left)).member_ids)

    return call


class Connection:
    """A connection for looking at a coordinator again and again, without tries of its own; a context manager."""

    def __init__(self, coordinator: str) -> None:
        self._address = coordinator
        self._addresses = CoordinatorAddresses.parse(coordinator)
        self._credentials = own_credentials(coordinator)

    def __enter__(self) -> Self:
        self._channel = loop_thread().run(self._open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        loop_thread().run(self._channel.close(None))

    def jobs(self, timeout: float) -> list[JobSummary]:
        """Returns all jobs, sorted by name."""
        return list(self.call(timeout, all_jobs).jobs)

    def job(self, name: str, timeout: float) -> GetJobResponse:
        """Returns one job with its members; raises `PacelineError` if there is none of that name."""
        return self.call(timeout, partial(one_job, name))

    async def _open(self) -> aio.Channel:
        # must be made on its loop
        return self._credentials.coordinator_channel(str(self._addresses.current), CHANNEL_OPTIONS)

    def call(self, timeout: float, call: Callable[[aio.Channel, float], Awaitable[T]]) -> T:
        """Makes a call once; if no coordinator answers, the next call asks another one."""

        async def ask() -> T:
            try:
                return await call(self._channel, timeout)
            except aio.AioRpcError as error:
                if error.code() in AWAY:
                    await check_tls(str(self._addresses.current), self._credentials.files, timeout)
                if error.code() in AWAY and self._addresses.several:
                    self._addresses.turn(leader_named_by(error))
                    await self._channel.close(None)
                    self._channel = await self._open()
                raise error_from_status(error, f"the coordinator at {self._address}") from None

        return loop_thread().run(ask())


@dataclass(frozen=True, slots=True)
class JobMember:
    """One worker of a job, as the coordinator sees it.

    Attributes:
        member_id: its id, which no other member of the job ever has.
        rank: its rank in the present view; None if it is in none, because it waits or is about to join.
        host: the name of its host.
        pid: its process id there.
    """

    member_id: str
    rank: int | None
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job at one moment.

    Attributes:
        members: its workers: by rank, then those in no view.
        reason: a sentence that says what the job does or waits for, as `paceline status` shows it.
    """

    members: tuple[JobMember, ...]
    reason: str


class RunningJob:
    """One job at a coordinator, seen from outside; a context manager.

    The token and certificates are those that this user's commands show, as for `token_for`. Each call is tried once: a
    coordinator that restarts is away for a moment.

    Args:
        coordinator: its address, "host:port", or several with commas between them.
        name: name of the job.
        timeout: seconds for an answer.

    Raises:
        ValueError: the address is malformed, or the PACELINE_* variables for TLS and tokens cannot be used.
    """

    def __init__(self, coordinator: str, name: str, timeout: float = 1.0) -> None:
        self._name = name
        self._timeout = timeout
        self._connection = Connection(coordinator)

    def __enter__(self) -> Self:
        self._connection.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._connection.__exit__(kind, error, tb)

    def status(self) -> JobStatus:
        """Returns the job's members, and what it does.

        Raises:
            CoordinatorUnreachable, OperationTimeout: no coordinator answers.
            PacelineError: no worker has joined the job yet, or this user may not see it.
        """
        found = self._connection.job(self._name, self._timeout)
        return JobStatus(tuple(map(_member, found.members)), found.summary.reason)

    def drain(self, *members: int | str) -> list[str]:
        """Tells these members to leave at the end of their step; they end with exit code 0, and the others go on.

        Args:
            members: at least one: ranks in the present view, as numbers or text, or member ids.

        Returns:
            The ids of the members that were told.

        Raises:
            ValueError: no member is named; `drain_all` is for all of them.
            CoordinatorUnreachable, OperationTimeout: no coordinator answers.
            LimitExceeded: the names do not fit into one request, which holds about 700 member ids.
            PacelineError: there is no such job or member, or this user may not drain it.
        """
        if not members:  # the request would mean all
            raise ValueError("drain() needs a rank or a member id; drain_all() drains all members")
        return self._connection.call(self._timeout, drain_call(self._name, tuple(map(str, members))))

    def drain_all(self) -> list[str]:
        """Tells all members to leave at the end of their step, which ends the job's training.

        Returns:
            The ids of the members that were told.

        Raises:
            CoordinatorUnreachable, OperationTimeout: no coordinator answers.
            PacelineError: there is no such job, or this user may not drain it.
        """
        return self._connection.call(self._timeout, drain_call(self._name, ()))


def _member(status: MemberStatus) -> JobMember:
    member = status.member
    rank = member.rank if status.in_view else None
    return JobMember(member.member_id, rank, member.process.host, member.process.pid)
