"""What one caller can take from the others: served at a pace, within a time, and not all places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline_server._grpc import aio
from pacelinepb.v1 import admin_pb2
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from support.coordinator import RawSession, duration, reason_of, refused, run, running

pytestmark = pytest.mark.alone


def test_session_messages_are_read_at_message_rate() -> None:
    async def main() -> None:
        async with running(message_rate=500.0, message_burst=50.0) as channel:
            session = await RawSession.register(channel, least=1, most=1)
            await session.view()
            began = time.monotonic()
            for _ in range(250):
                await session.call.write(pb.SessionRequest(heartbeat=pb.Heartbeat()))
            enter = pb.EnterBarrier(call=1, generation=1, name="b", timeout=duration(60.0))
            await session.call.write(pb.SessionRequest(enter_barrier=enter))
            while (await session.read()).WhichOneof("event") != "barrier_passed":
                pass
            assert 0.35 < time.monotonic() - began < 3.0

    run(main)


def test_calls_of_one_address_are_paced_and_not_refused() -> None:
    async def main() -> None:
        async with running(call_rate=200.0, call_burst=20.0) as channel:
            stub = AdminServiceStub(channel)
            began = time.monotonic()
            await asyncio.gather(*(stub.ListJobs(admin_pb2.ListJobsRequest(), timeout=10.0) for _ in range(100)))
            assert 0.35 < time.monotonic() - began < 3.0

    run(main)


async def paced(make: Callable[[], Any], code: str) -> None:
    """100 calls at once, which all end with that code, at 200 a second after 20 at once."""
    began = time.monotonic()
    codes = await asyncio.gather(*(make().code() for _ in range(100)))
    assert {each.name for each in codes} == {code}
    assert 0.35 < time.monotonic() - began < 3.0


def test_unauthenticated_refusals_are_paced() -> None:
    async def main() -> None:
        async with running(call_rate=200.0, call_burst=20.0, token="a-token-that-nobody-guesses") as channel:
            stub = AdminServiceStub(channel)
            await paced(lambda: stub.ListJobs(admin_pb2.ListJobsRequest(), timeout=10.0), "UNAUTHENTICATED")

    run(main)


def test_newly_opened_sessions_are_paced() -> None:
    async def main() -> None:
        async with running(call_rate=200.0, call_burst=20.0, first_message_time=0.05) as channel:
            await paced(lambda: RawSession(channel, "job").call, "DEADLINE_EXCEEDED")

    run(main)


def test_health_probes_are_not_paced() -> None:
    async def main() -> None:
        async with running(call_rate=1.0, call_burst=1.0) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            began = time.monotonic()
            for _ in range(20):
                assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
            assert time.monotonic() - began < 10.0

    run(main)


def test_a_silent_stream_ends_after_first_message_time() -> None:
    async def main() -> None:
        async with running(first_message_time=0.2) as channel:
            session = RawSession(channel, "job")
            assert (await session.call.code()).name == "DEADLINE_EXCEEDED"
            assert "no first message within 0.2 s" in await session.call.details()

    run(main)


def test_an_incomplete_request_is_refused_as_unavailable() -> None:
    """A worker's host may have been away for so long."""

    async def main() -> None:
        async with running(first_message_time=0.2) as channel:
            call: Any = channel.stream_unary("/pacelinepb.v1.StoreService/Set")()
            with pytest.raises(aio.AioRpcError, match="the request did not arrive") as caught:
                await call
            assert (caught.value.code().name, reason_of(caught.value)) == ("UNAVAILABLE", "LIMIT")

    run(main)


def test_one_job_cannot_take_all_session_places() -> None:
    async def main() -> None:
        async with running(max_job_sessions=2, max_sessions=4) as channel:
            for _ in range(2):
                await RawSession.register(channel, "greedy", least=3, most=3)
            with pytest.raises(aio.AioRpcError, match="2 sessions, the most that one job may have"):
                await RawSession.register(channel, "greedy", least=3, most=3)
            await RawSession.register(channel, "other", least=1, most=1)

    run(main)


@pytest.mark.parametrize("proved", [True, False])
def test_a_returning_member_needs_its_old_token_to_reuse_its_place(proved: bool) -> None:
    """It may have moved before its old session is known to have ended. Without the old token nobody's session ends."""

    async def main() -> None:
        async with running(max_job_sessions=2, max_sessions=4) as channel:
            first, _ = [await RawSession.register(channel, "full", least=3, most=3, pid=pid) for pid in (1, 2)]
            token = first.token if proved else b"a guess"
            again = RawSession.register(
                channel, "full", least=3, most=3, former_member_id=first.member_id, former_session_token=token
            )
            if proved:
                assert (await again).member_id != first.member_id
                assert "came back as a new member" in str((await refused(first)).details())
                return
            with pytest.raises(aio.AioRpcError, match="2 sessions, the most that one job may have"):
                await again
            await first.heartbeat()
            job = await AdminServiceStub(channel).GetJob(admin_pb2.GetJobRequest(job="full"))
            assert first.member_id in str(job)

    run(main)
