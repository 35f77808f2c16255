"""What one caller can take from the others: served at a pace, within a time, and not all places."""

from __future__ import annotations

import asyncio
import time

import pytest

from paceline_server._grpc import aio
from pacelinepb.v1 import admin_pb2
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from support.coordinator import RawSession, duration, run, running


def test_a_session_is_read_at_its_rate() -> None:
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


def test_calls_of_a_connection_are_served_at_their_rate_and_none_is_refused() -> None:
    async def main() -> None:
        async with running(call_rate=200.0, call_burst=20.0) as channel:
            stub = AdminServiceStub(channel)
            began = time.monotonic()
            await asyncio.gather(*(stub.ListJobs(admin_pb2.ListJobsRequest(), timeout=10.0) for _ in range(100)))
            assert 0.35 < time.monotonic() - began < 3.0

    run(main)


def test_a_stream_that_says_nothing_is_ended() -> None:
    async def main() -> None:
        async with running(first_message_time=0.2) as channel:
            session = RawSession(channel, "job")
            assert (await session.call.code()).name == "DEADLINE_EXCEEDED"
            assert "no first message within 0.2 s" in await session.call.details()

    run(main)


def test_one_job_does_not_take_the_places_of_all_others() -> None:
    async def main() -> None:
        async with running(max_job_sessions=2, max_sessions=4) as channel:
            for _ in range(2):
                await RawSession.register(channel, "greedy", least=3, most=3)
            with pytest.raises(aio.AioRpcError, match="2 sessions, as many as one job may have"):
                await RawSession.register(channel, "greedy", least=3, most=3)
            await RawSession.register(channel, "other", least=1, most=1)

    run(main)
