"""What an operator may ask of a running coordinator: drain, restart, and a restart by the coordinator itself."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from paceline_server._grpc import aio
from paceline_server.storage.memory import MemoryStorage
from paceline_server.storage.sqlite import SqliteStorage
from pacelinepb.pieces import cut, in_messages
from pacelinepb.v1 import admin_pb2 as pb
from pacelinepb.v1 import session_pb2, store_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.coordinator import RawSession, duration, reason_of, run
from support.coordinator import running as running_at_once

OPEN: dict[str, Any] = {"least": 1, "most": 2}


def running(*arguments: Any, **settings: Any) -> AbstractAsyncContextManager[aio.Channel]:
    """A coordinator; two workers that come one right after the other are in one view, also on a slow machine."""
    return running_at_once(*arguments, settle_time=1.0, **settings)


async def pair(channel: aio.Channel) -> tuple[RawSession, RawSession]:
    """Two members in a view, by rank."""
    sessions = [await RawSession.register(channel, pid=pid, **OPEN) for pid in (1, 2)]
    views = [await session.view() for session in sessions]
    by_rank = sorted(zip(views, sessions, strict=True), key=lambda each: each[0].rank)
    return by_rank[0][1], by_rank[1][1]


async def line(channel: aio.Channel) -> tuple[RawSession, RawSession]:
    """Two members of a line, in generation 2."""
    members = await pair(channel)
    for member in members:
        await member.send(meet=session_pb2.Meet(generation=1, tag=session_pb2.Tag(), manifest=b"m", fingerprint=b"f"))
    for member in members:
        view = await member.view()
        assert (view.generation, view.HasField("base")) == (2, True)
    return members


async def newcomer_s_view(session: RawSession) -> session_pb2.ViewFormed:
    while (message := await session.read()).WhichOneof("event") != "view_formed":
        assert message.WhichOneof("event") in ("waiting", "running")
    return message.view_formed


async def members_of(admin: Any) -> list[pb.MemberStatus]:
    return list((await admin.GetJob(pb.GetJobRequest(job="job"))).members)


def test_members_are_drained_by_rank_by_id_or_all_together() -> None:
    async def main() -> None:
        async with running() as channel:
            admin: Any = AdminServiceStub(channel)
            first, second = await pair(channel)
            told = await admin.DrainMembers(pb.DrainMembersRequest(job="job", members=["1", second.member_id]))
            assert list(told.member_ids) == [second.member_id]
            assert "paceline drain" in (await second.next("drain")).reason
            told = await admin.DrainMembers(pb.DrainMembersRequest(job="job"))
            assert list(told.member_ids) == [first.member_id, second.member_id]
            await first.next("drain")

    run(main)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.DrainMembersRequest(job="job", members=["0", "7"]), "has no member 7; no member was asked"),
        (pb.DrainMembersRequest(job="none"), "there is no job 'none'; paceline status lists"),
    ],
)
def test_drain_of_an_unknown_member_or_job_is_not_found(request_: pb.DrainMembersRequest, words: str) -> None:
    async def main() -> None:
        async with running() as channel:
            await pair(channel)
            admin: Any = AdminServiceStub(channel)
            with pytest.raises(aio.AioRpcError, match=words) as caught:
                await admin.DrainMembers(request_)
            assert reason_of(caught.value) == "NOT_FOUND"

    run(main)


def test_restart_lets_a_waiting_worker_start_a_new_view() -> None:
    async def main() -> None:
        async with running() as channel:
            admin: Any = AdminServiceStub(channel)
            first, second = await line(channel)
            first.call.cancel()
            second.call.cancel()
            third = await RawSession.register(channel, pid=3, **OPEN)
            answer = await admin.RestartJob(pb.RestartJobRequest(job="job"))
            assert list(answer.members) == ["rank 0 (host-a, pid 1)", "rank 1 (host-a, pid 2)"]
            view = await newcomer_s_view(third)
            assert (view.generation, view.world_size) == (3, 1)

    run(main)


def test_restart_after_restarts_a_disconnected_job_and_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(restart_after=0.2) as channel:
            first, second = await line(channel)
            first.call.cancel()
            second.call.cancel()
            third = await RawSession.register(channel, pid=3, **OPEN)
            view = await newcomer_s_view(third)
            assert (view.generation, view.world_size) == (3, 1)

    with caplog.at_level(logging.WARNING, "paceline_server"):
        run(main)
    text = "job job: no member of generation 2 has been connected for 0.2 s: all of them are declared dead"
    assert [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_restart_after_keeps_a_job_with_a_connected_member() -> None:
    async def main() -> None:
        async with running(restart_after=0.05) as channel:
            admin: Any = AdminServiceStub(channel)
            first, second = await line(channel)
            first.call.cancel()
            await RawSession.register(channel, pid=3, **OPEN)
            # A barrier's own timeout, four times as long, is the clock.
            await second.enter_barrier("b", timeout=0.2, generation=2)
            await second.next("barrier_failed")
            assert [m.member.rank for m in await members_of(admin) if m.in_view] == [0, 1]

    run(main)


def test_status_gives_the_standing_of_each_member() -> None:
    async def main() -> None:
        async with running() as channel:
            admin: Any = AdminServiceStub(channel)
            first, second = await line(channel)
            await RawSession.register(channel, pid=3, **OPEN)
            assert [m.standing for m in await members_of(admin)] == ["training", "training", "waiting"]
            second.call.cancel()
            while (standing := [m.standing for m in await members_of(admin)])[1] != "silent":
                pass
            assert standing == ["training", "silent", "waiting"]
            await first.heartbeat(operation=3, step=2)
            while (await members_of(admin))[0].progress.step != 2:
                pass

    run(main)


async def job_over(channel: aio.Channel, name: str) -> int:
    """A job whose only member has come and gone; returns its generation."""
    session = await RawSession.register(channel, name, least=1, most=1)
    generation = (await session.view()).generation
    await session.send(leave=session_pb2.Leave())
    await session.next("left")
    return generation


def test_resting_jobs_free_their_place_and_keep_their_generation() -> None:
    async def main() -> None:
        storage = MemoryStorage()
        async with running(storage, max_jobs=2) as channel:
            for name in ("a", "b", "c", "d"):
                assert await job_over(channel, name) == 1
            assert await job_over(channel, "a") == 2
            admin: Any = AdminServiceStub(channel)
            assert [job.name for job in (await admin.ListJobs(pb.ListJobsRequest())).jobs] == ["a", "b", "c", "d"]
            await RawSession.register(channel, "e")
            await RawSession.register(channel, "f")
            for name in ("a", "g"):  # at rest it takes no place, but to begin again it needs one
                with pytest.raises(aio.AioRpcError, match="has 2 jobs"):
                    await RawSession.register(channel, name)
        async with running(storage, max_jobs=2) as channel:
            assert await job_over(channel, "a") == 3
            assert await job_over(channel, "b") == 2

    run(main)


def test_nothing_is_kept_of_resting_jobs_without_keep_numbers() -> None:
    async def main() -> None:
        storage = MemoryStorage()
        async with running(storage, max_jobs=1, max_resting_jobs=1, keep_numbers=False) as channel:
            for name in ("a", "b", "c", "d"):
                assert await job_over(channel, name) == 1
            admin: Any = AdminServiceStub(channel)
            assert not (await admin.ListJobs(pb.ListJobsRequest())).jobs
        assert not await storage.load()

    run(main)


def test_the_store_is_deleted_with_its_job(tmp_path: Path) -> None:
    """In memory, on the disk, and at a restart; a job of that name that comes later finds none of its keys."""

    async def store(session: RawSession, channel: aio.Channel, value: bytes) -> None:
        request = store_pb2.SetRequest(caller=session.caller, key="k", value=cut(value))
        await StoreServiceStub(channel).Set(in_messages(request))

    async def find(session: RawSession, channel: aio.Channel) -> bytes:
        request = store_pb2.GetRequest(caller=session.caller, key="k", timeout=duration(0))
        return (await StoreServiceStub(channel).Get(request)).value

    async def main() -> None:
        path = tmp_path / "state.db"
        async with running(SqliteStorage(path), max_jobs=2, memory_bytes=64 << 20) as channel:
            for view in (True, False):  # of one that never had a view nothing is left at all
                for _ in range(12):  # one job may have 8 MiB
                    session = await RawSession.register(channel, "a" if view else "b", least=1 if view else 2)
                    if view:
                        await session.view()
                    await store(session, channel, b"v" * 900_000)
                    await session.leave()
        with closing(sqlite3.connect(path)) as file:
            assert file.execute("SELECT name, generation FROM job").fetchall() == [("a", 12)]
            assert file.execute("SELECT count(*) FROM key").fetchone() == (0,)
            file.execute("INSERT INTO key VALUES ('a', 'k', x'00'), ('c', 'k', x'00')")  # of an earlier version
            file.commit()
        async with running(SqliteStorage(path), max_jobs=2) as channel:
            sessions = [await RawSession.register(channel, job, least=1, most=1) for job in "ac"]
            assert [(await session.view()).generation for session in sessions] == [13, 1]
            for session in sessions:
                with pytest.raises(aio.AioRpcError) as caught:
                    await find(session, channel)
                assert reason_of(caught.value) == "TIMEOUT"

    run(main)


def test_a_forgotten_job_starts_above_its_workers_generation_floor() -> None:
    async def main() -> None:
        storage = MemoryStorage()
        async with running(storage, max_jobs=1) as channel:
            for name in ("a", "b"):
                assert await job_over(channel, name) == 1
            admin: Any = AdminServiceStub(channel)
            await admin.ForgetJob(pb.ForgetJobRequest(job="a"))
            with pytest.raises(aio.AioRpcError, match="there is no job 'a'"):
                await admin.ForgetJob(pb.ForgetJobRequest(job="a"))
            assert await job_over(channel, "c") == 1
        async with running(storage) as channel:
            shown = await RawSession.register(channel, "a", least=1, most=1, generation_floor=5)
            assert (await shown.view()).generation == 6, "above what its workers show"
            assert await job_over(channel, "b") == 2

    run(main)


def test_forget_is_refused_while_a_job_has_members() -> None:
    async def main() -> None:
        async with running() as channel:
            admin: Any = AdminServiceStub(channel)
            first, second = await line(channel)
            with pytest.raises(aio.AioRpcError, match="has 2 workers: to make them leave, use paceline drain job"):
                await admin.ForgetJob(pb.ForgetJobRequest(job="job"))
            for member in (first, second):
                member.call.cancel()
            while any(member.attached for member in await members_of(admin)):
                pass  # the coordinator has yet to hear of it
            with pytest.raises(aio.AioRpcError, match="run paceline restart job first") as caught:
                await admin.ForgetJob(pb.ForgetJobRequest(job="job"))
            assert reason_of(caught.value) == "BAD_REQUEST"
            await admin.RestartJob(pb.RestartJobRequest(job="job"))
            await admin.ForgetJob(pb.ForgetJobRequest(job="job"))

    run(main)


def test_a_finished_job_is_still_reported_as_finished_later() -> None:
    async def main() -> None:
        storage = MemoryStorage()
        async with running(storage, max_jobs=1) as channel:
            first, second = await line(channel)
            await first.send(finish=session_pb2.Finish(generation=2, step=1))
            for member in (first, second):
                assert (await member.next("finished")).step == 1
                await member.send(leave=session_pb2.Leave())
                await member.next("left")
            await job_over(channel, "other")
            late = await RawSession.register(channel, **OPEN)
            assert (await late.next("finished")).step == 1
        async with running(storage, max_jobs=1) as channel:
            await job_over(channel, "other")
            admin: Any = AdminServiceStub(channel)
            jobs = {job.name: job for job in (await admin.ListJobs(pb.ListJobsRequest())).jobs}
            assert jobs["job"].phase == pb.JOB_PHASE_FINISHED
            late = await RawSession.register(channel, **OPEN)
            assert (await late.next("finished")).step == 1

    run(main)
