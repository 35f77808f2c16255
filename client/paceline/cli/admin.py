"""Calls a coordinator from outside any job: lists jobs and members, and sends an operator's orders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from paceline._base.addresses import CoordinatorAddresses
from paceline._base.rpc import CHANNEL_OPTIONS, EOF, aio, error_from_status, grpc, leader_named_by, nobody_answers
from paceline._base.terminal import UsageError, say
from paceline._base.waits import loop_thread
from paceline._session.connection import check_tls
from paceline.cli.access import coordinator_address
from paceline.credentials import Credentials
from paceline.errors import CoordinatorUnreachable, PacelineError
from paceline.launch._own_coordinator import own_addresses, own_credentials
from paceline.launch._running_job import AWAY, all_jobs, drain_call, one_job
from pacelinepb.debug.gathered import Answered, label_of, read_answers
from pacelinepb.status_json import seconds
from pacelinepb.v1.admin_pb2 import (
    AskMembersRequest,
    AskMembersResponse,
    ForgetJobRequest,
    GetJobResponse,
    JobEvent,
    JobSummary,
    ListEventsRequest,
    ListJobsRequest,
    ListJobsResponse,
    MemberStatus,
    RestartJobRequest,
)
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.session_pb2 import JobSettings, Question

T = TypeVar("T")

_PAUSE_S = 0.2
"""Seconds between two tries; gRPC's connection attempts have a backoff of their own."""

_PATIENT_S = 1.0
"""Seconds after which the user is told that no coordinator answers, and for how long it will be tried."""

_EACH = 6
"""Calls, to several coordinators in turn, that wait for a second at most: a frozen one must not take all the time."""

_FEW = 5
"""Most names of jobs in an error."""


def label(status: MemberStatus) -> str:
    """Names a member as sentences do: its rank or member id, host and process id."""
    return label_of(status.member, in_view=status.in_view)


def is_heard(status: MemberStatus, settings: JobSettings) -> bool:
    """True if the member is connected and has sent something within `failure_timeout`.

    Its connection alone proves nothing: a host may vanish without closing it.
    """
    return status.attached and seconds(status.silent) < seconds(settings.failure_timeout)


def list_jobs(coordinator: str, timeout: float) -> list[JobSummary]:
    """Returns all jobs, sorted by name; tries for `timeout` seconds."""
    return list(list_all(coordinator, timeout).jobs)


def list_all(coordinator: str, timeout: float) -> ListJobsResponse:
    """Returns all jobs, and which of several coordinators leads; arguments and errors as for `list_jobs`."""
    return _run(coordinator, timeout, all_jobs)


def coordinator_of(job: str, coordinator: str | None, timeout: float) -> str:
    """Returns the coordinator that the operator named, else the one of this user's that has the job."""
    addresses = own_addresses()
    if coordinator is not None or len(addresses) < 2:
        return coordinator_address(coordinator)
    jobs: dict[str, list[str]] = {}
    for address in addresses:
        try:
            jobs[address] = [each.name for each in list_jobs(address, timeout)]
        except PacelineError:  # it has just ended, or is frozen: then it is shown without jobs
            jobs[address] = []
    having = [address for address in addresses if job in jobs[address]]
    if len(having) == 1:
        return having[0]
    what = "choose a coordinator (--coordinator)" if having else f"there is no job {job!r} at your coordinators"
    shown = ", ".join(f"{address} (jobs: {', '.join(names[:_FEW]) or 'none'})" for address, names in jobs.items())
    raise UsageError(f"{what}: your commands serve {shown}")


def get_job(coordinator: str, job: str, timeout: float) -> GetJobResponse:
    """Returns one job with its members."""
    return _run(coordinator, timeout, partial(one_job, job), job)


def drain(coordinator: str, job: str, members: Sequence[str], timeout: float) -> list[str]:
    """Tells members to leave at their next step boundary; returns the ids of those that were told.

    `members` are ranks in the current view, or member ids; empty for all. Raises `LimitExceeded` if the names do not
    fit into one request, which holds about 700 member ids.
    """
    return _run(coordinator, timeout, drain_call(job, members), job)


def list_events(coordinator: str, job: str, timeout: float) -> list[JobEvent]:
    """Returns what has happened to a job, oldest first, as far as the coordinator remembers."""

    async def call(channel: aio.Channel, left: float) -> list[JobEvent]:
        found: list[JobEvent] = []
        request = ListEventsRequest(job=job)
        while True:
            answer = await AdminServiceStub(channel).ListEvents(request, timeout=left)
            found += answer.events
            if answer.next <= request.after:
                return found
            request.after = answer.next

    return _run(coordinator, timeout, call)


def ask_members(
    coordinator: str,
    job: str,
    what: Question.ValueType,
    timeout: float,
    *,
    members: Sequence[str] = (),
    pids: Sequence[int] = (),
    patience: float = 1.0,
) -> list[Answered]:
    """Asks a job's members what they are doing; returns their answers by rank, then answers of members in no view.

    `members` are ranks in the current view, or member ids; empty for all. `Asked` says what `pids` are. The coordinator
    has `timeout` seconds to answer, and each member `patience` seconds.
    """
    request = AskMembersRequest(job=job, what=what, members=members, pids=pids)
    request.patience.FromNanoseconds(round(patience * 1e9))
    credentials = own_credentials(coordinator)

    async def call(channel: aio.Channel, left: float) -> list[Answered]:
        metadata = await credentials.metadata()  # the channel shows the token only for calls with one answer
        answers = AdminServiceStub(channel).AskMembers(request, metadata=metadata)
        found: list[AskMembersResponse] = []
        try:
            # Each member that is asked answers within `patience`, so something comes that often.
            while (answer := await asyncio.wait_for(answers.read(), left + patience)) is not EOF:
                assert isinstance(answer, AskMembersResponse)
                found.append(answer)
        except TimeoutError:
            raise CoordinatorUnreachable(f"the coordinator at {coordinator} has stopped answering") from None
        finally:
            answers.cancel()
        return read_answers(found)

    return _run(coordinator, timeout, call, job)


def restart(coordinator: str, job: str, timeout: float) -> list[str]:
    """Declares the members of a job's last generation dead; returns them as text for people."""

    async def call(channel: aio.Channel, left: float) -> list[str]:
        return list((await AdminServiceStub(channel).RestartJob(RestartJobRequest(job=job), timeout=left)).members)

    return _run(coordinator, timeout, call, job)


def forget(coordinator: str, job: str, timeout: float) -> None:
    """Removes a job that is over."""

    async def call(channel: aio.Channel, left: float) -> None:
        await AdminServiceStub(channel).ForgetJob(ForgetJobRequest(job=job), timeout=left)

    _run(coordinator, timeout, call, job)


def _run(address: str, timeout: float, call: Callable[[aio.Channel, float], Awaitable[T]], job: str = "") -> T:
    return loop_thread().run(_ask(address, timeout, own_credentials(address), call, job))


async def _ask(
    address: str, timeout: float, credentials: Credentials, call: Callable[[aio.Channel, float], Awaitable[T]], job: str
) -> T:
    """Retries until the coordinator answers or the time is up, because a coordinator that restarts is away briefly."""
    start = time.monotonic()
    attempt, told = 0, False
    addresses = CoordinatorAddresses.parse(address)
    channels = _Channels(credentials)
    async with channels:
        while True:
            left = timeout - (time.monotonic() - start)
            channel = channels.to(str(addresses.current))
            patience = min(left, _PATIENT_S) if addresses.several and attempt < _EACH else left
            try:
                return await call(channel, patience)
            except aio.AioRpcError as error:
                spent = time.monotonic() - start
                if error.code() not in AWAY:
                    if job and error.code() is grpc.StatusCode.NOT_FOUND:
                        await _check_name(channel, job, timeout - spent)
                    raise error_from_status(error, f"the coordinator at {address}") from None
                if attempt & (attempt - 1) == 0:  # 0, 1, 2, 4, 8...: it may come up later, with a wrong certificate
                    await check_tls(str(addresses.current), credentials.files, timeout - spent)
                addresses.turn(leader_named_by(error))
                attempt += 1
                if spent >= _PATIENT_S and not told and timeout - spent >= 1.0:
                    told = True
                    say(f"no coordinator answers at {address}; trying for another {timeout - spent:.0f} s")
                if spent + _PAUSE_S >= timeout:
                    raise nobody_answers(address, spent, error.details() or "") from None
            await asyncio.sleep(_PAUSE_S if not addresses.several else _PAUSE_S / 4)


class _Channels:
    """The channels to several coordinators, each made when it is first used; a context manager."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._made: dict[str, aio.Channel] = {}

    def to(self, address: str) -> aio.Channel:
        """Returns the channel to an address."""
        if address not in self._made:
            self._made[address] = self._credentials.coordinator_channel(address, CHANNEL_OPTIONS)
        return self._made[address]

    async def __aenter__(self) -> _Channels:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close(None) for channel in self._made.values()))


async def _check_name(channel: aio.Channel, job: str, left: float) -> None:
    """Names the jobs that this user may see, if they are few and the one that was named is none of them."""
    try:
        answer = await AdminServiceStub(channel).ListJobs(ListJobsRequest(), timeout=left)
    except aio.AioRpcError:
        return  # the coordinator's own sentence is shown
    names = [each.name for each in answer.jobs]
    if job not in names and 0 < len(names) <= _FEW:
        raise PacelineError(f"there is no job {job!r}; jobs: {', '.join(names)}")
