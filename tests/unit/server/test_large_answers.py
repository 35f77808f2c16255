"""Answers about many members or jobs: written a part at a time, and once for all who ask within a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from prometheus_client.registry import Collector

from paceline_protocol.coordinator import LeftJob, Membership
from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import LimitMet, NotFound
from paceline_server.security.tokens import Role
from paceline_server.services import admin
from paceline_server.services.admin import AdminHandlers, AdminLimits
from paceline_server.settings import ServerSettings
from paceline_server.storage.memory import MemoryStorage
from paceline_server.streams import SessionStream
from paceline_server.web import routes
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.v1 import admin_pb2
from pacelinepb.v1 import session_pb2 as pb
from support.counted_lines import lines_of

MANY = 1_000
FOREVER = AdminLimits(kept_s=1e6)


def run(main: Callable[[Dispatcher], Awaitable[None]], **settings: Any) -> None:
    async def with_dispatcher() -> None:
        dispatcher = Dispatcher(ServerSettings(**settings), MemoryStorage())
        await dispatcher.start()
        try:
            await main(dispatcher)
        finally:
            dispatcher.drain()

    asyncio.run(with_dispatcher())


def register(dispatcher: Dispatcher, job: str, count: int, world: int = 2_000) -> list[SessionStream]:
    """So many workers come, who wait for more."""
    message = pb.Register(protocol_version=PROTOCOL_VERSION, job=job, address="host:1")
    message.process.host, message.process.pid = "host", 1
    message.settings.min_workers = message.settings.max_workers = world
    message.settings.failure_timeout.FromSeconds(600)
    return [dispatcher.register(message) for _ in range(count)]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The members that were written into answers."""
    ids: list[str] = []
    write = admin._member

    def count(now: float, session: Any, *args: Any, **named: Any) -> admin_pb2.MemberStatus:
        ids.append(session.member_id)
        return write(now, session, *args, **named)

    monkeypatch.setattr(admin, "_member", count)
    return ids


def test_get_job_yields_the_loop_while_writing_many_members(written: list[str]) -> None:
    async def main(dispatcher: Dispatcher) -> None:
        ids = [stream.member_id for stream in register(dispatcher, "job", MANY)]
        answer = asyncio.ensure_future(AdminHandlers(dispatcher).GetJob(admin_pb2.GetJobRequest(job="job")))
        most = before = 0
        while not answer.done():
            await asyncio.sleep(0)
            most, before = max(most, len(written) - before), len(written)
        assert [status.member.member_id for status in answer.result().members] == ids
        assert most <= 200

    run(main)


def test_the_job_page_yields_the_loop_while_converting_many_members(monkeypatch: pytest.MonkeyPatch) -> None:
    converted = 0
    convert = routes.members_as_dicts

    def count(detail: admin_pb2.GetJobResponse) -> Iterator[dict[str, Any]]:
        nonlocal converted
        for member in convert(detail):
            converted += 1
            yield member

    monkeypatch.setattr(routes, "members_as_dicts", count)

    async def main(dispatcher: Dispatcher) -> None:
        ids = [stream.member_id for stream in register(dispatcher, "job", MANY)]
        answer = asyncio.ensure_future(
            routes.Routes(dispatcher, None, None, names=None, streaming=nullcontext)._detail("job", Role.READ)
        )
        most = before = 0
        while not answer.done():
            await asyncio.sleep(0)
            most, before = max(most, converted - before), converted
        assert [member["member_id"] for member in answer.result()["members"]] == ids
        assert most <= 201

    run(main)


def test_callers_of_get_job_share_one_answer_about_a_large_job(written: list[str]) -> None:
    async def main(dispatcher: Dispatcher) -> None:
        register(dispatcher, "job", MANY)
        handlers, request = AdminHandlers(dispatcher, FOREVER), admin_pb2.GetJobRequest(job="job")
        calls = [asyncio.ensure_future(handlers.GetJob(request)) for _ in range(20)]
        await asyncio.sleep(0)
        calls[0].cancel()  # others wait for what it has begun
        answers = await asyncio.gather(*calls[1:])
        answers.append(await handlers.GetJob(request))
        assert {len(answer.members) for answer in answers} == {MANY}
        assert len(written) == MANY
        with pytest.raises(NotFound):
            await handlers.GetJob(admin_pb2.GetJobRequest(job="another"))

    run(main)


def test_a_stopping_coordinator_gives_no_earlier_answer() -> None:
    async def main(dispatcher: Dispatcher) -> None:
        register(dispatcher, "job", MANY)
        handlers = AdminHandlers(dispatcher, FOREVER)

        async def phase() -> int:
            return (await handlers.GetJob(admin_pb2.GetJobRequest(job="job"))).summary.phase

        assert await phase() == admin_pb2.JOB_PHASE_WAITING
        dispatcher.jobs["job"].membership.state.finished = 7
        assert await phase() == admin_pb2.JOB_PHASE_WAITING
        dispatcher.drain()
        assert await phase() == admin_pb2.JOB_PHASE_FINISHED

    run(main)


def test_a_shared_answer_expires_and_is_rebuilt(written: list[str]) -> None:
    async def main(dispatcher: Dispatcher) -> None:
        register(dispatcher, "job", MANY)
        handlers, request = AdminHandlers(dispatcher, AdminLimits(kept_s=0.0)), admin_pb2.GetJobRequest(job="job")
        first = await handlers.GetJob(request)
        for _ in range(5):
            await asyncio.sleep(0)
        register(dispatcher, "job", 1)
        assert len((await handlers.GetJob(request)).members) == len(first.members) + 1

    run(main)


def test_an_answer_about_a_small_job_is_never_stale() -> None:
    async def main(dispatcher: Dispatcher) -> None:
        handlers, request = AdminHandlers(dispatcher, FOREVER), admin_pb2.GetJobRequest(job="job")
        for count in range(1, 4):
            register(dispatcher, "job", 1)
            assert len((await handlers.GetJob(request)).members) == count

    run(main)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that were written into lists."""
    names: list[str] = []
    write = AdminHandlers._summary

    def count(handlers: AdminHandlers, membership: Membership) -> admin_pb2.JobSummary:
        names.append(membership.state.name)
        return write(handlers, membership)

    monkeypatch.setattr(AdminHandlers, "_summary", count)
    return names


def test_list_jobs_yields_the_loop_while_listing_many_jobs(listed: list[str]) -> None:
    async def main(dispatcher: Dispatcher) -> None:
        names = sorted(f"job-{number}" for number in range(900))
        for name in names:
            register(dispatcher, name, 1)
        answer = asyncio.ensure_future(AdminHandlers(dispatcher).ListJobs(admin_pb2.ListJobsRequest()))
        most = before = 0
        while not answer.done():
            await asyncio.sleep(0)
            most, before = max(most, len(listed) - before), len(listed)
        assert [job.name for job in answer.result().jobs] == names
        assert most <= 200

    run(main)


def test_a_job_that_ends_while_jobs_are_listed_is_left_out() -> None:
    async def main(dispatcher: Dispatcher) -> None:
        streams = [register(dispatcher, f"job-{number:03}", 1)[0] for number in range(500)]
        answer = asyncio.ensure_future(AdminHandlers(dispatcher).ListJobs(admin_pb2.ListJobsRequest()))
        for _ in range(2):
            await asyncio.sleep(0)
        dispatcher.apply_of(streams[-1], LeftJob(streams[-1].member_id, ""))
        assert [job.name for job in (await answer).jobs] == [stream.job for stream in streams[:-1]]

    run(main)


def test_callers_share_one_list_of_many_jobs(listed: list[str]) -> None:
    async def main(dispatcher: Dispatcher) -> None:
        for number in range(300):
            register(dispatcher, f"job-{number}", 1)
        handlers = AdminHandlers(dispatcher, FOREVER)
        answers = await asyncio.gather(*(handlers.ListJobs(admin_pb2.ListJobsRequest()) for _ in range(20)))
        answers.append(await handlers.ListJobs(admin_pb2.ListJobsRequest()))
        assert {len(answer.jobs) for answer in answers} == {300}
        assert len(listed) == 300

    run(main)


LONG = {
    "ListJobs": admin_pb2.ListJobsRequest(),
    "GetJob": admin_pb2.GetJobRequest(job="job"),
    "ListEvents": admin_pb2.ListEventsRequest(),
}


@pytest.mark.parametrize("method", LONG)
def test_at_most_one_long_answer_completes_in_each_round_of_the_loop(method: str) -> None:
    """To serialise an answer for each of 600 callers in one round would hold up all others."""

    async def main(dispatcher: Dispatcher) -> None:
        register(dispatcher, "job", 300)
        for number in range(300):
            register(dispatcher, f"job-{number}", 1)
        call = getattr(AdminHandlers(dispatcher), method)
        calls = [asyncio.ensure_future(call(LONG[method])) for _ in range(20)]
        most = before = 0
        while not all(each.done() for each in calls):
            await asyncio.sleep(0)
            done = sum(each.done() for each in calls)
            most, before = max(most, done - before), done
        assert most == 1

    run(main)


def test_the_metrics_page_yields_the_loop_after_each_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """All metrics of 100 jobs together took 40 ms."""
    written: list[str] = []
    write = routes.generate_latest

    def count(collector: Collector) -> bytes:
        written.extend(metric.name for metric in collector.collect())
        return write(collector)

    monkeypatch.setattr(routes, "generate_latest", count)

    async def main(dispatcher: Dispatcher) -> None:
        register(dispatcher, "job", 1)
        site = routes.Routes(dispatcher, None, None, names=None, streaming=nullcontext)
        answer = asyncio.ensure_future(site._metrics(make_mocked_request("GET", "/metrics")))
        most = before = 0
        while not answer.done():
            await asyncio.sleep(0)
            most, before = max(most, len(written) - before), len(written)
        assert most == 1
        assert len(written) > 20
        text = answer.result().text or ""
        assert all(f"# HELP {name}" in text for name in written)

    run(main)


def test_http_answers_pause_for_as_long_as_the_previous_one_took() -> None:
    built: list[tuple[float, float]] = []

    async def build() -> bytes:
        clock = asyncio.get_running_loop().time
        began = clock()
        while clock() < began + 0.02:
            pass
        built.append((began, clock()))
        return b""

    async def main(dispatcher: Dispatcher) -> None:
        site = routes.Routes(dispatcher, None, None, names=None, streaming=nullcontext)
        await asyncio.gather(*(site._shared(key, build) for key in "abc"))
        for (began, ended), (next_began, _) in pairwise(built):
            assert next_began - ended > 0.99 * (ended - began)
        assert not site._pause, "one who asks later is not kept waiting"

    run(main)


def test_registration_cost_does_not_grow_with_the_number_of_jobs() -> None:
    lines: dict[int, int] = {}

    async def main(dispatcher: Dispatcher) -> None:
        for number in range(401):
            lines[number] = lines_of(partial(register, dispatcher, f"job-{number}", 1)) if number in (50, 400) else 0
            register(dispatcher, f"job-{number}", 1)

    run(main)
    assert lines[400] < 1.05 * lines[50]


def test_ended_sessions_and_failed_jobs_free_their_session_places() -> None:
    async def main(dispatcher: Dispatcher) -> None:
        register(dispatcher, "a", 2)
        first, *_ = register(dispatcher, "b", 2)
        register(dispatcher, "c", 1)
        with pytest.raises(LimitMet, match="all jobs have 5 of 6"):
            register(dispatcher, "d", 1)
        dispatcher.apply_of(first, LeftJob(first.member_id, ""))
        register(dispatcher, "d", 1)
        with pytest.raises(LimitMet, match="all jobs have 5 of 6"):
            register(dispatcher, "e", 1)
        dispatcher._fail(dispatcher.jobs["a"])
        for name in ("e", "f"):
            register(dispatcher, name, 1)
        with pytest.raises(LimitMet, match="all jobs have 5 of 6"):
            register(dispatcher, "g", 1)

    run(main, max_sessions=6)
