"""A real coordinator on a free port, and workers on raw stubs: sessions, views, verdicts, barriers."""

import asyncio
import hashlib
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline_server import Coordinator, ServerSettings, StateUnusable
from paceline_server._grpc import EOF, aio, grpc
from paceline_server.storage.memory import MemoryStorage
from pacelinepb.v1 import admin_pb2, session_pb2, store_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.errors_pb2 import ErrorReason
from pacelinepb.v1.session_pb2_grpc import SessionServiceStub
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.coordinator import RawSession, duration, reason_of, refused, run, running

LOST = ErrorReason.ERROR_REASON_PEER_LOST


async def pair(channel: aio.Channel) -> tuple[RawSession, RawSession]:
    """Two members in one view, by rank."""
    sessions = [await RawSession.register(channel, host=f"host-{name}", pid=7) for name in "ab"]
    for session in sessions:
        await session.view()
    return sessions[0], sessions[1]


def test_members_meet_in_a_view_and_fetch_it() -> None:
    async def main() -> None:
        async with running(page_members=1) as channel:
            first, second = [await RawSession.register(channel, host=f"host-{name}", pid=7) for name in "ab"]
            views = [await first.view(), await second.view()]
            assert [(view.generation, view.world_size, view.rank, view.pages) for view in views] == [
                (1, 2, 0, 2),
                (1, 2, 1, 2),
            ]
            pages = await first.get_pages(views[0])
            assert hashlib.sha256(pages).digest() == views[0].members_sha256
            members = session_pb2.GetViewResponse.FromString(pages).members  # pages concatenate to one list
            assert [(m.rank, m.member_id, m.process.host, m.address) for m in members] == [
                (0, first.member_id, "host-a", "host-a:7"),
                (1, second.member_id, "host-b", "host-b:7"),
            ]

    run(main)


def test_pages_of_another_generation_or_job_are_refused() -> None:
    async def main() -> None:
        async with running() as channel:
            first, _ = await pair(channel)
            for request, reason, code in [
                ({"job": "job", "generation": 2}, "STALE_GENERATION", grpc.StatusCode.FAILED_PRECONDITION),
                ({"job": "other", "generation": 1}, "NOT_FOUND", grpc.StatusCode.NOT_FOUND),
                ({"job": "job", "generation": 1, "page": 1}, "BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT),
            ]:
                with pytest.raises(aio.AioRpcError) as caught:
                    await first.stub.GetView(session_pb2.GetViewRequest(**request))
                assert (reason_of(caught.value), caught.value.code()) == (reason, code)

    run(main)


def test_a_dead_member_is_named_in_the_verdict() -> None:
    async def main() -> None:
        async with running() as channel:
            first, second = await pair(channel)
            second.call.cancel()
            await first.report(LOST, 1, operation=4)
            verdict = await first.next("verdict")
            assert (verdict.generation, verdict.reason, list(verdict.culprits), verdict.operation) == (1, LOST, [1], 4)
            assert verdict.text == "rank 1 (host-b, pid 7) died: its session and its link to rank 0 ended"
            await first.enter_barrier("b")
            assert (await first.next("barrier_failed")).text == verdict.text

    run(main)


def test_a_frozen_member_is_evicted_after_failure_timeout() -> None:
    async def main() -> None:
        async with running() as channel:
            first = await RawSession.register(channel, failure_timeout=0.3)
            second = await RawSession.register(channel, failure_timeout=0.3)
            await first.view()
            await second.view()

            async def beat() -> None:
                while True:
                    await asyncio.sleep(first.heartbeat_interval)
                    await first.heartbeat()

            beating = asyncio.create_task(beat())
            verdict = await first.next("verdict")
            assert "rank 1 (host-a, pid 1) was silent for " in verdict.text
            assert (await second.next("verdict")) == verdict  # should it wake, it knows
            assert reason_of(await refused(second)) == "SESSION_ENDED"
            beating.cancel()

    run(main)


def test_a_member_is_dead_once_its_stream_ends_and_its_port_refuses() -> None:
    """A busy machine closes the sockets of a dying process one by one; nobody waits for the end of its lease."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as door:
            door.setblocking(False)
            async with running() as channel:
                ports = 1, door.getsockname()[1]
                first, dying = [
                    await RawSession.register(channel, host="127.0.0.1", pid=port, failure_timeout=60.0)
                    for port in ports
                ]
                await first.view()
                dying.call.cancel()
                async with asyncio.timeout(10.0):
                    knock, _ = await asyncio.get_running_loop().sock_accept(door)
                knock.close()
                door.close()
                verdict = await first.next("verdict")
                assert verdict.culprits == [1]
                assert "nobody listens at its address" in verdict.text

    run(main)


def test_a_broken_stream_is_resumed() -> None:
    async def main() -> None:
        ended: asyncio.Queue[str] = asyncio.Queue()

        def observe(what: str, member_id: str, at: float) -> None:
            if what == "stream_ended":
                ended.put_nowait(member_id)

        async with running(observer=observe) as channel:
            first, second = await pair(channel)
            second.call.cancel()
            assert await ended.get() == second.member_id
            again = await RawSession.resume(channel, second, 1)
            assert (again.member_id, again.token) == (second.member_id, second.token)
            await first.enter_barrier("b")
            await again.enter_barrier("b")
            await first.barrier_passed()
            await again.barrier_passed()

    run(main)


def test_a_second_stream_takes_over_from_the_first() -> None:
    async def main() -> None:
        async with running() as channel:
            _, second = await pair(channel)
            again = await RawSession.resume(channel, second, 1)
            assert reason_of(await refused(second)) == "SESSION_ENDED"
            await again.heartbeat()
            await again.leave()

    run(main)


def test_resume_with_a_wrong_session_token_is_refused() -> None:
    async def main() -> None:
        async with running() as channel:
            first, second = await pair(channel)
            with pytest.raises(aio.AioRpcError) as caught:
                await RawSession.resume(channel, second, 1, session_token=b"stolen")
            assert reason_of(caught.value) == "SESSION_ENDED"
            await first.enter_barrier("b")
            await second.enter_barrier("b")
            await second.barrier_passed()

    run(main)


def test_resume_at_a_coordinator_without_state_ends_the_session() -> None:
    async def main() -> None:
        async with running() as channel:
            session = await RawSession.register(channel)
        async with running() as channel:
            with pytest.raises(aio.AioRpcError, match=r"started again without a state file \(--state\)") as caught:
                await RawSession.resume(channel, session, 1)
            assert reason_of(caught.value) == "SESSION_ENDED"

    run(main)


def test_members_and_generations_survive_a_restart() -> None:
    async def main() -> None:
        storage = MemoryStorage()
        async with running(storage) as channel:
            first, second = await pair(channel)
        async with running(storage) as channel:
            first = await RawSession.resume(channel, first, 1)
            second = await RawSession.resume(channel, second, 1)
            await first.enter_barrier("b")
            await second.enter_barrier("b")
            for session in (first, second):
                await session.barrier_passed()
                await session.leave()
            for session in [await RawSession.register(channel) for _ in range(2)]:
                assert (await session.view()).generation == 2

    run(main)


def test_members_share_one_door_secret_across_a_restart() -> None:
    async def main() -> None:
        storage = MemoryStorage()
        async with running(storage) as channel:
            first, second = await pair(channel)
            other = await RawSession.register(channel, "other")
        assert first.door_secret == second.door_secret != other.door_secret
        async with running(storage) as channel:
            newcomer = await RawSession.register(channel)
            assert newcomer.door_secret == first.door_secret
            assert (await RawSession.resume(channel, first, 1)).door_secret == first.door_secret

    run(main)


def test_the_door_secret_changes_when_the_job_starts_anew() -> None:
    async def main() -> None:
        async with running(MemoryStorage()) as channel:
            before = await pair(channel)
            caller = before[0].caller
            await StoreServiceStub(channel).Set([store_pb2.SetRequest(caller=caller, key="kept", value=[b"1"])])
            for session in before:
                await session.leave()
            anew = await pair(channel)
            assert len({session.door_secret for session in (*before, *anew)}) == 2
            assert all(len(session.door_secret) == 32 for session in anew)

    run(main)


def test_the_door_secret_changes_in_each_line_of_generations() -> None:
    """For a candidate that has been there before, also if it was cut off when the line ended; and after a restart."""

    async def main() -> None:
        storage = MemoryStorage()
        async with running(storage) as channel:
            first = await RawSession.register(channel, least=1, most=1)
            await first.view()
            waiting, cut_off = [await RawSession.register(channel, least=1, most=1, pid=pid) for pid in (2, 3)]
            old = first.door_secret
            assert waiting.door_secret == cut_off.door_secret == old
            cut_off.call.cancel()
            await first.leave()
            assert (await waiting.view()).generation == 2
            assert len(waiting.door_secret) == 32
            resumed = await RawSession.resume(channel, cut_off, 0)
            assert resumed.door_secret == waiting.door_secret != old
        async with running(storage) as channel:
            assert (await RawSession.resume(channel, waiting, 2)).door_secret == waiting.door_secret

    run(main)


def test_leaving_with_an_error_sends_peer_raised_to_the_others() -> None:
    async def main() -> None:
        async with running() as channel:
            first, second = await pair(channel)
            await second.leave("KeyError: 'x'")
            verdict = await first.next("verdict")
            assert verdict.reason == ErrorReason.ERROR_REASON_PEER_RAISED
            assert verdict.text == "rank 1 (host-b, pid 7) raised KeyError: 'x'"

    run(main)


def test_messages_after_leave_are_ignored() -> None:
    async def main() -> None:
        async with running() as channel:
            session = await RawSession.register(channel)
            await session.send(leave=session_pb2.Leave())
            await session.send(heartbeat=session_pb2.Heartbeat())
            await session.next("left")
            assert await session.call.read() is EOF

    run(main)


def test_a_reported_exit_ends_the_session_and_names_the_member() -> None:
    async def main() -> None:
        async with running() as channel:
            first, second = await pair(channel)
            request = session_pb2.ReportExitRequest(
                job="job", process=session_pb2.ProcessIdentity(host="host-b", pid=7), exit_code=1
            )
            assert (await first.stub.ReportExit(request)).known
            assert (await first.next("verdict")).text == "rank 1 (host-b, pid 7) exited with code 1"
            assert reason_of(await refused(second)) == "SESSION_ENDED"
            assert not (await first.stub.ReportExit(request)).known

    run(main)


def test_repeated_exit_reports_of_unknown_workers_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running() as channel:
            first, second = await pair(channel)
            for _ in range(3):
                for pid, host in ((first, "host-a"), (second, "host-b")):
                    process = session_pb2.ProcessIdentity(host=host, pid=7)
                    await pid.stub.ReportExit(session_pb2.ReportExitRequest(job="job", process=process, exit_code=1))

    with caplog.at_level("INFO", "paceline_server"):
        run(main)
    assert sum("there is no worker" in record.getMessage() for record in caplog.records) == 1, caplog.text


def test_a_barrier_timeout_lists_the_missing_members() -> None:
    async def main() -> None:
        async with running() as channel:
            first, _ = await pair(channel)
            await first.enter_barrier("epoch-1", timeout=0.05)
            failed = await first.next("barrier_failed")
            assert failed.reason == ErrorReason.ERROR_REASON_TIMEOUT
            assert failed.text.startswith(
                "barrier 'epoch-1' (round 0) timed out after 0.05 s: 1 of 2 members arrived; "
            )
            assert re.search(r"missing rank 1 \(host-b\): last heard \d+\.\d", failed.text)
            assert list(failed.culprits) == [1]

    run(main)


@pytest.mark.parametrize(
    ("entry", "text"),
    [({"name": ""}, "1 to 256 bytes"), ({"name": "x" * 257}, "1 to 256 bytes"), ({"name": "b"}, "timeout above 0 s")],
)
def test_a_malformed_enter_barrier_fails_only_that_barrier_call(entry: dict[str, str], text: str) -> None:
    async def main() -> None:
        async with running() as channel:
            first, _ = await pair(channel)
            await first.send(enter_barrier=session_pb2.EnterBarrier(call=3, generation=1, **entry))
            failed = await first.next("barrier_failed")
            assert (failed.call, failed.reason) == (3, ErrorReason.ERROR_REASON_BAD_REQUEST)
            assert text in failed.text
            await first.leave()

    run(main)


def test_a_first_message_other_than_register_is_refused() -> None:
    async def main() -> None:
        async with running() as channel:
            for event in ({"heartbeat": session_pb2.Heartbeat()}, {}):
                session = RawSession(channel, "job")
                await session.send(**event)
                assert reason_of(await refused(session)) == "BAD_REQUEST"
            session = RawSession(channel, "job")
            await session.call.done_writing()
            assert reason_of(await refused(session)) == "BAD_REQUEST"

    run(main)


def test_a_second_register_ends_the_stream() -> None:
    async def main() -> None:
        async with running() as channel:
            session = await RawSession.register(channel)
            await session.send(register=session_pb2.Register(job="job"))
            assert reason_of(await refused(session)) == "BAD_REQUEST"

    run(main)


def launch(**fields: object) -> session_pb2.Launch:
    whole: dict[str, Any] = {"id": "launch", "workers": 2, "patience": duration(30.0), **fields}
    return session_pb2.Launch(**whole)


def test_a_launch_of_which_one_worker_ended_before_any_joined_is_not_waited_for() -> None:
    async def main() -> None:
        async with running() as channel:
            process = session_pb2.ProcessIdentity(host="host-a", pid=2)
            report = session_pb2.ReportExitRequest(job="job", process=process, exit_code=1, launch_id="launch")
            stub: Any = SessionServiceStub(channel)
            assert not (await stub.ReportExit(report)).known
            session = await RawSession.register(channel, least=1, most=4, launch=launch())
            await session.view()  # else it would take 30 s

    run(main)


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({"protocol_version": 10, "newest_protocol_version": 11}, "VERSION", "versions 10 to 11 of the protocol"),
        ({"protocol_version": 7, "newest_protocol_version": 0}, "VERSION", "version 7 of the protocol"),
        ({"protocol_version": 9, "newest_protocol_version": 8}, "BAD_REQUEST", "9 to 8 of the protocol"),
        ({"protocol_version": 0, "newest_protocol_version": 9}, "BAD_REQUEST", "0 to 9 of the protocol"),
        ({"job": "a\nb"}, "BAD_REQUEST", "must be printable"),
        ({"least": 0}, "INVALID_WORLD_SIZE", "min_workers must be 1 or more"),
        ({"rank": 2}, "INVALID_RANK", "rank 2 is outside the world of 2"),
        ({"least": 3, "most": 3}, "SETTINGS_DISAGREE", "min_workers is 3 at host-a"),
        ({"failure_timeout": 0.0}, "BAD_REQUEST", "failure_timeout must be"),
        ({"generation_floor": 1 << 62}, "BAD_REQUEST", "generation_floor"),
        ({"launch": launch(id="")}, "BAD_REQUEST", "a launch needs an id"),
        ({"launch": launch(id="two words")}, "BAD_REQUEST", "the id of a launch"),
        ({"launch": launch(workers=0)}, "BAD_REQUEST", "1 to 65536 workers, not 0"),
        ({"launch": launch(workers=1 << 17)}, "BAD_REQUEST", "1 to 65536 workers"),
        ({"launch": session_pb2.Launch(id="launch", workers=2)}, "BAD_REQUEST", "launch.patience is required"),
    ],
)
def test_invalid_registrations_are_refused(fields: dict[str, object], reason: str, text: str) -> None:
    async def main() -> None:
        async with running() as channel:
            await RawSession.register(channel)
            with pytest.raises(aio.AioRpcError, match=text) as caught:
                await RawSession.register(channel, **fields)  # type: ignore[arg-type]
            assert reason_of(caught.value) == reason

    run(main)


def test_a_second_claim_to_a_rank_is_refused() -> None:
    async def main() -> None:
        async with running() as channel:
            await RawSession.register(channel, rank=1, host="left")
            with pytest.raises(aio.AioRpcError, match=r"by left .* and by right") as caught:
                await RawSession.register(channel, rank=1, host="right")
            assert reason_of(caught.value) == "RANK_TAKEN"

    run(main)


def test_sessions_and_jobs_are_limited() -> None:
    async def main() -> None:
        async with running(max_sessions=4, max_jobs=1) as channel:
            await RawSession.register(channel, "a")
            for name in ("b", "a", "a"):
                if name == "a":
                    await RawSession.register(channel, "a", least=2)
                    break
                with pytest.raises(aio.AioRpcError, match="1 jobs") as caught:
                    await RawSession.register(channel, name)
                assert reason_of(caught.value) == "LIMIT"
            with pytest.raises(aio.AioRpcError, match="2 sessions") as caught:
                await RawSession.register(channel, "a")
            assert reason_of(caught.value) == "LIMIT"

    run(main)


def test_list_jobs_and_get_job_describe_the_jobs() -> None:
    async def main() -> None:
        async with running() as channel:
            admin = AdminServiceStub(channel)
            first, _ = await pair(channel)
            await RawSession.register(channel, "other", least=4, most=8)
            jobs = (await admin.ListJobs(admin_pb2.ListJobsRequest())).jobs
            assert [(job.name, job.phase, job.generation, job.world_size, job.waiting) for job in jobs] == [
                ("job", admin_pb2.JOB_PHASE_RUNNING, 1, 2, 0),
                ("other", admin_pb2.JOB_PHASE_WAITING, 0, 0, 1),
            ]
            assert jobs[1].reason == "waiting for 3 more workers (1 of at least 4)"
            await first.heartbeat(operation=12, inside=True)
            await first.enter_barrier("b", timeout=0.01)
            await first.next("barrier_failed")  # so the heartbeat before it has arrived
            job = await admin.GetJob(admin_pb2.GetJobRequest(job="job"))
            assert [(m.member.rank, m.in_view, m.attached) for m in job.members] == [(0, True, True), (1, True, True)]
            assert (job.members[0].progress.operation, job.members[0].progress.inside) == (12, True)
            assert (job.settings.min_workers, job.settings.failure_timeout.seconds) == (2, 3)
            with pytest.raises(aio.AioRpcError) as caught:
                await admin.GetJob(admin_pb2.GetJobRequest(job="none"))
            assert reason_of(caught.value) == "NOT_FOUND"

    run(main)


def test_a_state_file_in_use_raises_state_unusable(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "state.db"
        async with running(state_path=path):
            with pytest.raises(StateUnusable, match=r"state\.db: another coordinator"):
                await Coordinator(ServerSettings(listen="127.0.0.1:0", state_path=path)).start()

    run(main)
