"""The front door: strangers stay outside, and what breaks the protocol names its sender (I4, I9)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline import errors
from paceline._base.rpc import aio, error_from_status, grpc
from paceline._base.waits import loop_thread
from paceline._links.base import Purpose
from paceline._links.fault import Suspicion
from paceline._links.frame import MAX_FRAME_BYTES, Frame, FrameKind, encode
from paceline_protocol import _versions
from pacelinepb import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, RELEASE
from pacelinepb.v1 import peer_pb2, peer_pb2_grpc
from pacelinepb.v1.errors_pb2 import ErrorReason
from pacelinepb.v1.session_pb2 import Verdict
from support.grpc_pair import JOB, GrpcWorld, grpc_world


def hello(**changes: Any) -> peer_pb2.HelloRequest:
    request = peer_pb2.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        job=JOB,
        from_member="member-0",
        to_member="member-1",
        generation=1,
        purpose=peer_pb2.PURPOSE_POINT_TO_POINT,  # rank 0 has a stream for collectives already
        offered=[peer_pb2.LINK_KIND_GRPC],
    )
    request.MergeFrom(peer_pb2.HelloRequest(**changes))
    return request


def at_door_1(world: GrpcWorld, talk: Callable[[aio.Channel], Awaitable[Any]]) -> Any:
    """Runs a conversation with the door of rank 1."""

    async def run() -> Any:
        async with aio.insecure_channel(world.meshes[0].peers[1].address) as channel:
            return await talk(channel)

    return loop_thread().run(run(), 10.0)


async def knock(channel: aio.Channel, request: peer_pb2.HelloRequest) -> bytes:
    answer: peer_pb2.HelloResponse = await peer_pb2_grpc.PeerServiceStub(channel).Hello(request, timeout=5.0)
    return answer.ticket


async def deliver(channel: aio.Channel, ticket: bytes, *frames: bytes, half_close: bool = True) -> grpc.StatusCode:
    """Opens a frame stream, sends raw bytes, half-closes, and returns the status that the door ends it with.

    Nothing is written to a stream that the door has ended already: grpc would put a status of its own (INTERNAL) in
    the place of the door's if the write found the end out first. For a stream that the door is to end: no half-close.
    """
    method = channel.stream_stream("/pacelinepb.v1.PeerService/Frames")
    call = method(metadata=aio.Metadata(("paceline-ticket-bin", ticket)))
    with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):  # refused: the status says so
        if await call.read() is aio.EOF:
            return await call.code()
        for data in frames:
            await call.write(data)
        if half_close:
            await call.done_writing()
        while await call.read() is not aio.EOF:
            pass
    return await call.code()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol_version": 99}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"protocol_version": 7}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"job": "another"}, grpc.StatusCode.NOT_FOUND),
        ({"to_member": "member-7"}, grpc.StatusCode.NOT_FOUND),
        ({"from_member": "stranger"}, grpc.StatusCode.NOT_FOUND),
        ({"purpose": 77}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_an_invalid_hello_is_refused(changes: dict[str, Any], code: grpc.StatusCode) -> None:
    with grpc_world() as world:
        with pytest.raises(aio.AioRpcError) as caught:
            at_door_1(world, lambda channel: knock(channel, hello(**changes)))
        assert not world.faults[1].failed
    assert caught.value.code() is code


def test_a_member_with_the_oldest_protocol_version_is_accepted() -> None:
    with grpc_world() as world:
        assert world.meshes[1].version == PROTOCOL_VERSION
        at_door_1(world, lambda channel: knock(channel, hello(protocol_version=OLDEST_PROTOCOL_VERSION)))


def test_a_version_refusal_keeps_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_versions, "FRAMES_VERSION", PROTOCOL_VERSION)
    with grpc_world() as world:
        world.meshes[0].version = OLDEST_PROTOCOL_VERSION
        with pytest.raises(errors.PeerLost) as caught:
            world.meshes[0].link(1, Purpose.POINT_TO_POINT).recv(time.monotonic() + 5.0)
        assert world.faults[0].first is not None
        assert (world.faults[0].first.reason, world.faults[0].first.accused) == (ErrorReason.ERROR_REASON_VERSION, 1)
    text = f"speaks version 8 of the protocol in generation 1, but its peer ({RELEASE}) was told version 9"
    assert text in str(caught.value)
    assert f"(the caller is {RELEASE})" in str(caught.value)


def test_a_hello_for_an_old_generation_raises_stale_generation() -> None:
    with grpc_world(generation=5) as world, pytest.raises(aio.AioRpcError) as caught:
        at_door_1(world, lambda channel: knock(channel, hello(generation=4)))
    assert isinstance(error_from_status(caught.value, "hello"), errors.StaleGeneration)


def test_frames_need_a_ticket_and_a_ticket_works_only_once() -> None:
    frame = encode(Frame(FrameKind.DATA, 1, 1, 0, b"", b"x"))
    close = encode(Frame(FrameKind.CLOSE, 1, 0, 0, b"", b""))

    async def talk(channel: aio.Channel) -> list[grpc.StatusCode]:
        ticket = await knock(channel, hello())
        return [
            await deliver(channel, os.urandom(16), frame),
            await deliver(channel, ticket, frame, close),
            await deliver(channel, ticket, frame),
        ]

    with grpc_world() as world:
        codes = at_door_1(world, talk)
        assert world.meshes[1].link(0, Purpose.POINT_TO_POINT).recv(time.monotonic() + 5.0).payload == b"x"
    assert codes == [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED]


def test_a_second_stream_of_a_link_raises_peer_broke_protocol() -> None:
    async def talk(channel: aio.Channel) -> list[grpc.StatusCode]:
        close = encode(Frame(FrameKind.CLOSE, 1, 0, 0, b"", b""))
        return [await deliver(channel, await knock(channel, hello()), close) for _ in range(2)]

    with grpc_world() as world:
        assert at_door_1(world, talk) == [grpc.StatusCode.OK, grpc.StatusCode.ALREADY_EXISTS]
        with pytest.raises(errors.PeerBrokeProtocol, match="opened a link twice") as caught:
            world.meshes[1].link(0, Purpose.POINT_TO_POINT).recv(time.monotonic() + 5.0)
    assert caught.value.ranks == (0,)


def test_a_frame_of_another_generation_raises_peer_broke_protocol() -> None:
    async def talk(channel: aio.Channel) -> grpc.StatusCode:
        ticket = await knock(channel, hello())
        return await deliver(channel, ticket, encode(Frame(FrameKind.DATA, 2, 1, 0, b"", b"x")), half_close=False)

    with grpc_world() as world:
        assert at_door_1(world, talk) is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(errors.PeerBrokeProtocol, match="generation 2") as caught:
            world.meshes[1].link(0, Purpose.POINT_TO_POINT).recv(time.monotonic() + 5.0)
    assert caught.value.ranks == (0,)


@pytest.mark.parametrize("last", [FrameKind.CLOSE, FrameKind.LEAVE])
@pytest.mark.parametrize("kind", [FrameKind.DATA, FrameKind.CLOSE])
def test_a_frame_after_the_last_one_raises_peer_broke_protocol(kind: FrameKind, last: FrameKind) -> None:
    close = encode(Frame(last, 1, 0, 0, b"", b""))

    async def talk(channel: aio.Channel) -> grpc.StatusCode:
        after = encode(Frame(kind, 1, 1, 0, b"", b""))
        return await deliver(channel, await knock(channel, hello()), close, after, half_close=False)

    with grpc_world() as world:
        assert at_door_1(world, talk) is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(errors.PeerBrokeProtocol, match=f"{kind.name} came after the last") as caught:
            world.meshes[1].link(0, Purpose.POINT_TO_POINT).recv(time.monotonic() + 5.0)
    assert caught.value.ranks == (0,)


def test_the_group_name_limit_counts_bytes() -> None:
    with grpc_world() as world:
        assert len(at_door_1(world, lambda channel: knock(channel, hello(group="é" * 128)))) == 16
        with pytest.raises(aio.AioRpcError) as caught:
            at_door_1(world, lambda channel: knock(channel, hello(group="é" * 129)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff\xff no verdict",
        Verdict(generation=1, reason=ErrorReason.ERROR_REASON_PEER_LOST, culprits=[999]).SerializeToString(),
        Verdict(generation=7, reason=ErrorReason.ERROR_REASON_PEER_LOST, culprits=[1]).SerializeToString(),
        Verdict(generation=1, reason=ErrorReason.ERROR_REASON_PEER_LOST, culprits=[1] * 9_000).SerializeToString(),
    ],
    ids=["unreadable", "nobody", "another generation", "thousands"],
)
def test_an_invalid_abort_raises_peer_broke_protocol(payload: bytes) -> None:
    async def talk(channel: aio.Channel) -> None:
        await deliver(channel, await knock(channel, hello()), encode(Frame(FrameKind.ABORT, 1, 0, 0, b"", payload)))

    with grpc_world() as world:
        at_door_1(world, talk)
        with pytest.raises(errors.PeerBrokeProtocol, match="abort") as caught:
            world.meshes[1].link(0, Purpose.POINT_TO_POINT).recv(time.monotonic() + 5.0)
    assert caught.value.ranks == (0,)


def test_a_long_abort_message_is_truncated_and_delivered() -> None:
    with grpc_world() as world:
        text = "\N{WARNING SIGN}" * 5_000
        world.faults[0].suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, 0, 7, text))
        with pytest.raises(errors.PeerRaised) as caught:
            world.meshes[1].link(0, Purpose.POINT_TO_POINT).recv(time.monotonic() + 5.0)
    assert str(caught.value).count("\N{WARNING SIGN}") == 2_000


def test_a_foreign_job_is_refused_without_waiting_for_its_generation() -> None:
    with grpc_world() as world, pytest.raises(aio.AioRpcError) as caught:
        at_door_1(world, lambda channel: knock(channel, hello(job="another", generation=10**9)))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


WHOLE = encode(Frame(FrameKind.DATA, 1, 1, 0, b"", b"x" * 99))


def sealed(data: bytearray) -> bytes:
    """The bytes with a checksum at their end that is right."""
    return bytes(data[:-4]) + zlib.crc32(data[:-4]).to_bytes(4, "little")


async def delivered(channel: aio.Channel, data: bytes) -> None:
    """One message, of rank 0."""
    await deliver(channel, await knock(channel, hello()), data)


@pytest.mark.parametrize("at", [0, 1, 10], ids=["tag", "kind", "another tag"])
def test_an_invalid_frame_with_a_valid_checksum_raises_peer_broke_protocol(at: int) -> None:
    data = bytearray(WHOLE)
    data[at] = 9
    with grpc_world() as world:
        at_door_1(world, lambda channel: delivered(channel, sealed(data)))
        with pytest.raises(errors.PeerBrokeProtocol, match="rank 0") as caught:
            world.meshes[1].link(0, Purpose.POINT_TO_POINT).recv(time.monotonic() + 5.0)
    assert caught.value.ranks == (0,)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        os.urandom(300),
        WHOLE[:-1],
        WHOLE[:60] + bytes([WHOLE[60] ^ 1]) + WHOLE[61:],
        bytes(MAX_FRAME_BYTES + 1),
    ],
    ids=["empty", "random", "truncated", "one bit", "too long"],
)
def test_corrupted_bytes_raise_peer_lost(data: bytes) -> None:
    with grpc_world() as world:
        at_door_1(world, lambda channel: delivered(channel, data))
        with pytest.raises(errors.PeerLost, match=r"bytes from rank 0 .* have changed on the way") as caught:
            world.meshes[1].link(0, Purpose.POINT_TO_POINT).recv(time.monotonic() + 5.0)
    assert type(caught.value) is errors.PeerLost, "its program is not to blame"
    assert caught.value.ranks == (0,)


def test_a_far_too_long_message_raises_peer_lost() -> None:
    """By grpc, which does not say why: the sender is named all the same."""

    async def talk(channel: aio.Channel) -> None:
        await deliver(channel, await knock(channel, hello()), bytes(10 * MAX_FRAME_BYTES))

    with grpc_world() as world:
        at_door_1(world, talk)
        with pytest.raises(errors.PeerLost, match="rank 0") as caught:
            world.meshes[1].link(0, Purpose.POINT_TO_POINT).recv(time.monotonic() + 5.0)
    assert caught.value.ranks == (0,)


def test_bytes_that_are_not_grpc_do_not_disturb_links() -> None:
    with grpc_world() as world:
        host, port = world.meshes[0].peers[1].address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + os.urandom(1000))
            stranger.settimeout(5.0)
            while stranger.recv(4096):
                pass
        link, back = (world.meshes[rank].link(1 - rank, Purpose.COLLECTIVE) for rank in (0, 1))
        link.send(Frame(FrameKind.DATA, 1, 1, 0, b"", b"still here"), time.monotonic() + 5.0)
        assert back.recv(time.monotonic() + 5.0).payload == b"still here"


def test_an_abort_propagates_along_the_links() -> None:
    from paceline._links.fault import Suspicion

    with grpc_world(3) as world:
        for rank in range(3):  # the ring's links are up
            world.meshes[rank].link((rank + 1) % 3, Purpose.COLLECTIVE).send(
                Frame(FrameKind.DATA, 1, 1, 0, b"", b""), time.monotonic() + 5.0
            )
        for rank in range(3):
            world.meshes[rank].link((rank - 1) % 3, Purpose.COLLECTIVE).recv(time.monotonic() + 5.0)
        text = "rank 0 called all_reduce where rank 2 called broadcast"
        world.faults[0].suspect(Suspicion(ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH, 2, 9, text))
        for rank in (1, 2):
            with pytest.raises(errors.CollectiveMismatch, match="broadcast") as caught:
                world.meshes[rank].link((rank - 1) % 3, Purpose.COLLECTIVE).recv(time.monotonic() + 5.0)
            assert (caught.value.ranks, caught.value.operation) == ((2,), 9)
