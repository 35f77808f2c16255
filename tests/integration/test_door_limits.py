"""What strangers can make a worker's front door keep, wait for, and say (I9)."""

from __future__ import annotations

import asyncio
import inspect
import select
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from paceline._base.rpc import aio, grpc, untyped
from paceline._base.waits import loop_thread
from paceline._elastic.peer_calls import get_manifest, out_of_reach, take_state
from paceline._links import grpc_door
from paceline._links.frame import MAX_FRAME_BYTES
from paceline._links.grpc_door import Door, DoorLimits
from paceline._links.grpc_mesh import GrpcMesh
from paceline._links.grpc_methods import MAX_READING_EACH, MAX_REQUEST_BYTES, RequestLimits
from paceline.cli.launcher.reports import ExitReports
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.bounds import MOST
from pacelinepb.v1 import peer_pb2
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub
from support.grpc_pair import JOB, GrpcWorld, grpc_world
from support.http2 import DATA, HEADERS, SETTINGS, call_headers, claimed, connect, frame, open_call
from support.waiting import wait_for

pytestmark = pytest.mark.alone

SERVICE = "/pacelinepb.v1.PeerService/"
METHODS = ("Hello", "DescribeState", "GetState", "GetManifest", "Knock")
SOON = 20.0
FAR = 2**63
"""A generation that will not come."""

SHORT = DoorLimits(requests=RequestLimits(read_s=0.4, hurried_s=0.2))


class Flood:
    """A connection with calls whose requests go on for as long as the door takes them, and never end.

    Attributes:
        streams: what SETTINGS allow at one time.
        sent: bytes.
        ended: streams that the door has ended.
    """

    def __init__(self, address: str, calls: int, size: int, method: str = "Hello") -> None:
        self.sent, self.streams = 0, 0
        self.ended: set[int] = set()
        self._there: socket.socket = connect(address, SOON)
        numbers = range(1, 2 * calls, 2)
        self._left = dict.fromkeys(numbers, size - 1)
        self._first, self._room = 65535, Counter(dict.fromkeys([0, *numbers], 65535))
        headers = call_headers(SERVICE + method)
        self._there.sendall(open_call(SERVICE + method))
        self._there.sendall(b"".join(frame(HEADERS, 4, number, headers) for number in numbers[1:]))
        for number in numbers:
            self._there.sendall(frame(DATA, 0, number, claimed(size)))
            self._room.subtract((0,) * 5 + (number,) * 5)
        self._data = b""

    def pump(self, seconds: float, done: Callable[[], bool] = lambda: False) -> None:
        """Sends what fits."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not done():
            while select.select([self._there], [], [], 0)[0]:
                self._hear(self._there.recv(1 << 20))
            for number, left in self._left.items():
                size = min(left, self._room[0], self._room[number], 16384)
                if size > 0 and number not in self.ended:
                    self._there.sendall(frame(DATA, 0, number, bytes(size)))
                    self.sent += size
                    self._left[number] -= size
                    self._room.subtract({0: size, number: size})
            select.select([self._there], [], [], 0.01)

    def close(self) -> None:
        self._there.close()

    def _hear(self, data: bytes) -> None:
        assert data, "the door has closed the connection"
        self._data += data
        while len(self._data) >= 9 and len(self._data) >= (end := 9 + int.from_bytes(self._data[:3], "big")):
            kind, flags, stream = self._data[3], self._data[4], int.from_bytes(self._data[5:9], "big")
            payload, self._data = self._data[9:end], self._data[end:]
            if kind == 8:  # WINDOW_UPDATE
                self._room[stream] += int.from_bytes(payload, "big")
            elif kind == SETTINGS and not flags:
                said = {payload[i : i + 2]: payload[i + 2 : i + 6] for i in range(0, len(payload), 6)}
                self.streams = int.from_bytes(said.get(b"\0\3", b"")) or self.streams
                more = (int.from_bytes(said.get(b"\0\4", b"")) or self._first) - self._first
                self._first += more
                self._room.update(dict.fromkeys(self._left, more))
                self._there.sendall(frame(SETTINGS, 1, 0, b""))
            elif kind == 6 and not flags:  # PING
                self._there.sendall(frame(6, 1, 0, payload))
            elif kind == HEADERS and flags & 1:
                self.ended.add(stream)


def door_of(world: GrpcWorld) -> str:
    return world.meshes[0].peers[1].address


def hello(**changes: Any) -> peer_pb2.HelloRequest:
    said = {"job": JOB, "from_member": "member-0", "to_member": "member-1", "generation": 1, **changes}
    return peer_pb2.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        purpose=peer_pb2.PURPOSE_COLLECTIVE,
        offered=[peer_pb2.LINK_KIND_GRPC],
        **said,  # type: ignore[arg-type]
    )


def on_loop(world: GrpcWorld, talk: Callable[[aio.Channel], Awaitable[Any]]) -> Any:
    """A conversation with the door of rank 1, on a connection of its own."""

    async def run() -> Any:
        async with aio.insecure_channel(door_of(world), options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            return await talk(channel)

    return loop_thread().run(run(), SOON)


def refused(world: GrpcWorld, method: str, request: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, Paceline's reason and the sentence."""

    async def talk(channel: aio.Channel) -> aio.AioRpcError:
        try:
            answer = getattr(PeerServiceStub(channel), method)(request, timeout=SOON)
            if hasattr(answer, "read"):
                async for _ in answer:
                    pass
            else:
                await answer
        except aio.AioRpcError as error:
            return error
        raise AssertionError("it was let in")

    error: aio.AioRpcError = on_loop(world, talk)
    status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()  # type: ignore[arg-type]
    assert status is not None
    assert status.details[0].Unpack(info)
    return error.code(), info.reason, error.details() or ""


async def knock(channel: aio.Channel, **changes: Any) -> bytes:
    answer: peer_pb2.HelloResponse = await PeerServiceStub(channel).Hello(hello(**changes), timeout=SOON)
    return answer.ticket


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_unfinished_requests_are_ended_after_a_time_limit() -> None:
    with grpc_world(limits=SHORT) as world, ExitStack() as stack:
        floods = [Flood(door_of(world), 2, MAX_FRAME_BYTES, method) for method in METHODS]
        for flood in floods:
            stack.callback(flood.close)
        for flood in floods:
            flood.pump(0.05)
            assert not flood.ended
        for flood in floods:
            flood.pump(SOON, lambda flood=flood: len(flood.ended) == 2)  # type: ignore[misc]
            assert flood.ended == {1, 3}
        assert not world.doors[1]._requests._reading


def test_unfinished_requests_of_one_connection_hold_little_memory() -> None:
    """100 requests of 4 MiB each, again and again: the door takes few of them in, and lets go of those."""
    with grpc_world(limits=SHORT) as world, ExitStack() as stack:
        before, sizes = resident(), []
        for _ in range(2):
            flood = Flood(door_of(world), 100, MAX_FRAME_BYTES)
            stack.callback(flood.close)  # not before: what is kept shall not go with the connection
            flood.pump(SOON, lambda flood=flood: len(flood.ended) == 100)  # type: ignore[misc]
            assert flood.streams == grpc_door.MAX_STREAMS
            assert len(flood.ended) == 100
            sizes.append(resident() - before)
        assert max(sizes) < 100 << 20, sizes
        assert sizes[1] - sizes[0] < 24 << 20, f"it grows each time: {sizes}"


def test_excess_calls_and_oversized_messages_are_refused_at_once() -> None:
    """One call too many on a connection, and a message whose head says that it is longer than any."""
    requests = RequestLimits(hurried_s=600.0)
    with grpc_world(limits=DoorLimits(requests=requests)) as world, ExitStack() as stack:
        flood = Flood(door_of(world), MAX_READING_EACH + 4, 1000)
        stack.callback(flood.close)
        flood.pump(SOON, lambda: len(flood.ended) == 4)
        assert world.doors[1]._requests._reading.total() == MAX_READING_EACH
        flood = Flood(door_of(world), 1, grpc_door.MAX_MESSAGE_BYTES + 1)
        stack.callback(flood.close)
        flood.pump(SOON, lambda: bool(flood.ended))
        assert flood.ended, "well before a request that does not end"
    assert grpc_door.MAX_MESSAGE_BYTES < 5 << 20, "whoever reaches the port can have it kept"


def test_a_get_state_request_with_the_most_chunks_fits_the_limit() -> None:
    chunks = [2**32 - 1] * MOST["GetStateRequest.chunks"]
    request = peer_pb2.GetStateRequest(job="j" * 128, to_member="m" * 64, chunks=chunks)
    assert request.ByteSize() < MAX_REQUEST_BYTES


def test_unfinished_requests_are_ended_sooner_when_there_are_many() -> None:
    """While there are as many as can be, a caller is told to try again; one beyond `many` hurries all of them."""
    for max_reading in (12, 13):
        requests = RequestLimits(read_s=600.0, hurried_s=0.5, many=12, max_reading=max_reading)
        with grpc_world(limits=DoorLimits(requests=requests)) as world, ExitStack() as stack:
            links = [link for mesh in world.meshes for link in mesh._dialled]
            wait_for(lambda links=links: all(link.opened for link in links))  # type: ignore[misc]  else theirs count too
            floods = [Flood(door_of(world), 3, 1000) for _ in range(4)]
            for flood in floods:
                stack.callback(flood.close)
            wait_for(lambda door=world.doors[1]: door._requests._reading.total() == 12)  # type: ignore[misc]
            if max_reading == 12:
                code, reason, _ = refused(world, "Hello", hello())
                assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "LIMIT")
                continue
            assert len(on_loop(world, knock)) == 16
            for flood in floods:
                flood.pump(SOON, lambda flood=flood: len(flood.ended) == 3)  # type: ignore[misc]


def test_an_oversized_request_is_refused_with_reason_limit() -> None:
    with grpc_world() as world:
        for method in METHODS:
            request = hello() if method == "Hello" else getattr(peer_pb2, f"{method}Request")()
            request.job = "j" * MAX_REQUEST_BYTES
            code, reason, text = refused(world, method, request)
            assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT")
            assert f"{MAX_REQUEST_BYTES}" in text


@pytest.mark.parametrize("count", [0, 2])
def test_a_unary_call_with_no_or_two_requests_is_refused(count: int) -> None:
    async def talk(channel: aio.Channel) -> grpc.StatusCode:
        call = untyped(channel.stream_stream)(f"{SERVICE}Hello")()
        for _ in range(count):
            await call.write(hello().SerializeToString())
        await call.done_writing()
        code: grpc.StatusCode = await call.code()
        return code

    with grpc_world() as world:
        assert on_loop(world, talk) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("long", ["guess", "x" * 64, "\n" * 64, "é" * 32, "\0\x1b[2J" * 12])
def test_a_refusal_is_short_printable_and_reveals_no_job_name(long: str) -> None:
    """Whatever was sent: it is repeated in few printable characters, and the job's name is not told."""
    with grpc_world() as world:
        world.doors[1].window.member_id = "member-1"
        answers = [
            refused(world, "Hello", hello(job=2 * long)),
            refused(world, "Hello", hello(to_member=long)),
            refused(world, "Hello", hello(from_member=long)),
            refused(world, "GetManifest", peer_pb2.GetManifestRequest(job=long, to_member=long)),
            refused(world, "DescribeState", peer_pb2.DescribeStateRequest(job=long, to_member=long)),
            refused(world, "Knock", peer_pb2.KnockRequest(job=long, to_member=long, address="10.0.0.1:1")),
        ]
    for code, reason, text in answers:
        assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND")
        assert len(text) < 250
        assert text.isprintable()
        assert JOB not in text
        assert "member-1" not in text


def test_hello_to_another_member_is_refused_without_waiting() -> None:
    with grpc_world() as world:
        world.doors[1].window.member_id = "member-1"
        start = time.monotonic()
        assert refused(world, "Hello", hello(to_member="x", generation=FAR))[0] is grpc.StatusCode.NOT_FOUND
        assert time.monotonic() - start < 2.0


@pytest.mark.parametrize("limits", [DoorLimits(max_waiting=3), DoorLimits(max_waiting_each=3)], ids=["all", "each"])
def test_callers_waiting_for_a_later_view_do_not_block_current_ones(limits: DoorLimits) -> None:
    async def talk(channel: aio.Channel) -> None:
        early = [asyncio.create_task(knock(channel, generation=FAR)) for _ in range(5)]
        done, waiting = await asyncio.wait(early, timeout=0.2)
        assert (len(done), len(waiting)) == (2, 3)  # one too many is told at once
        assert len(await knock(channel)) == 16
        await asyncio.wait(waiting)
        for task in early:
            error = task.exception()
            assert isinstance(error, aio.AioRpcError)
            assert error.code() is grpc.StatusCode.UNAVAILABLE

    with grpc_world(limits=replace(limits, ticket_s=0.5)) as world:
        on_loop(world, talk)
        assert not world.doors[1]._waiting


@pytest.mark.parametrize("made", [Door, GrpcMesh, ExitReports, take_state, get_manifest, out_of_reach])
def test_credentials_are_a_required_argument(made: Any) -> None:
    assert inspect.signature(made).parameters["credentials"].default is inspect.Parameter.empty
