"""Thousands of connections, callers that never come to an end, floods: the others are served all the same."""

from __future__ import annotations

import asyncio
import itertools
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from integration.hostile import Targets, targets_in
from paceline_server._grpc import aio
from pacelinepb.v1 import admin_pb2, peer_pb2
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub
from support.coordinator import RawSession, duration
from support.http2 import PREFACE, SETTINGS, connect, frame, open_call
from support.waiting import wait_for

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(120)]

CONNECTIONS = 10_000
BEGINNINGS = {"silent": b"", "settled": PREFACE + frame(SETTINGS, 0, 0, b"")}


@pytest.mark.parametrize("beginning", ["silent", pytest.param("settled", marks=pytest.mark.exhaustive)])
def test_ten_thousand_abandoned_connections_leave_no_files_or_memory(beginning: str, tmp_path: Path) -> None:
    with _files(1_024), targets_in(tmp_path) as targets, _files(CONNECTIONS + 2_000):
        soft, hard = resource.prlimit(targets.process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        files, sizes = targets.files(), []

        def open_and_leave(count: int) -> None:
            with ExitStack() as stack:
                for _ in range(count):
                    stack.enter_context(connect(targets.coordinator)).sendall(BEGINNINGS[beginning])
                assert _seconds_to_list(targets) < 5.0  # behind all of them, for they are taken in order
                wait_for(lambda: targets.files() <= files + 5)  # who calls nothing is not kept
            sizes.append(targets.resident())

        for _ in range(12):  # few at a time: a leak would hide in the memory that ten thousand have left free
            open_and_leave(1_000)
        assert sizes[-1] - sizes[1] < 4 << 20, f"it grows each time: {sizes}"
        open_and_leave(CONNECTIONS)
        assert sizes[-1] < 400 << 20
        targets.check()


@pytest.mark.parametrize("beginning", [pytest.param("silent", marks=pytest.mark.exhaustive), "settled"])
def test_a_door_recovers_from_more_connections_than_its_file_limit(beginning: str, tmp_path: Path) -> None:
    """Strangers' at its door, opened and left: they go, and the door lets in who comes then."""
    with _files(300), targets_in(tmp_path) as targets, _files(2_000), ExitStack() as stack:
        for _ in range(1_000):
            stack.enter_context(connect(targets.door)).sendall(BEGINNINGS[beginning])
        with grpc.insecure_channel(targets.door) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                PeerServiceStub(channel).Knock(peer_pb2.KnockRequest(job="another"), timeout=60, wait_for_ready=True)
            assert "does not prove that it belongs to this job" in str(caught.value)  # it has been heard
        targets.check()


def test_slow_callers_do_not_delay_other_calls(tmp_path: Path) -> None:
    """A byte of a preface now and then, and calls whose message never ends: 500 of each, for five seconds."""
    call = open_call("/pacelinepb.v1.SessionService/GetView")
    with targets_in(tmp_path) as targets, ExitStack() as stack:
        slow = [(stack.enter_context(connect(targets.coordinator)), words) for words in [PREFACE, call] * 500]
        end, longest = time.monotonic() + 5.0, 0.0
        for n in itertools.count():
            if time.monotonic() > end:
                break
            for there, words in slow:
                with suppress(OSError):  # closed by now, for it has been too slow
                    there.send(words[n : n + 1] or b"\0")
            longest = max(longest, _seconds_to_list(targets))
        assert longest < 1.0
        targets.check()


def test_members_that_flood_their_sessions_do_not_delay_other_calls(tmp_path: Path) -> None:
    async def flood(address: str, until: float) -> int:
        async with aio.insecure_channel(address) as channel:
            session = await RawSession.register(channel, "flood", least=1, most=1)
            count = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(until):
                    for count in itertools.count():
                        enter = pb.EnterBarrier(call=count, name=f"b{count}", timeout=duration(60.0))
                        await session.call.write(pb.SessionRequest(heartbeat=pb.Heartbeat(operation=1)))
                        await session.call.write(pb.SessionRequest(meet=pb.Meet()))
                        await session.call.write(pb.SessionRequest(enter_barrier=enter))
            return count

    async def both(targets: Targets) -> tuple[list[int], list[float]]:
        async def look() -> list[float]:
            found = []
            for _ in range(30):
                found.append(await asyncio.to_thread(_seconds_to_list, targets))
                await asyncio.sleep(0.1)
            return found

        *sent, seconds = await asyncio.gather(*(flood(targets.coordinator, 4.0) for _ in range(4)), look())
        return sent, seconds  # type: ignore[return-value]

    with targets_in(tmp_path) as targets:
        sent, seconds = asyncio.run(both(targets))
        assert min(sent) > 1_000, "they did flood"
        assert sorted(seconds)[-3] < 2.0, seconds
        targets.check()


def _seconds_to_list(targets: Targets) -> float:
    began = time.monotonic()
    with grpc.insecure_channel(targets.coordinator, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        AdminServiceStub(channel).ListJobs(admin_pb2.ListJobsRequest(), timeout=10)
    return time.monotonic() - began


@contextmanager
def _files(count: int) -> Iterator[None]:
    """So many files may be open in this process, and in those that it starts until they change it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
