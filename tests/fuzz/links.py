"""What a peer's shared memory, sockets and door say to a link: descriptors, handovers, streams, answers."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from unittest import mock

from google.protobuf.message import DecodeError

from fuzz.door import _loop
from fuzz.wire import PEERS, pack_chunks, unpack_chunks, without_checksums
from paceline._base.arrays import MAX_SIGNATURE_BYTES
from paceline._links.base import LinkEnded, LinkTimeout, Peer
from paceline._links.fault import Fault
from paceline._links.frame import MAX_FRAME_BYTES, Frame, FrameError, FrameKind
from paceline._links.grpc_kind import GrpcOutgoing
from paceline._links.outbox import Outbox
from paceline._links.registry import LinkKinds
from paceline._links.shm import handover
from paceline._links.shm.control_segment import (
    CONTROL_BYTES,
    DESCRIPTOR,
    LAYOUT,
    SLOT_BYTES,
    SLOTS,
    SLOTS_AT,
    STAGING_AT,
)
from paceline._links.shm.incoming import ShmIncoming
from paceline._links.shm.outgoing import ANNOUNCEMENT
from paceline._links.shm.segment import Segment, attach
from paceline._links.tcp._tcp_incoming import TcpIncoming
from paceline._links.tcp._tcp_sockets import Stream
from paceline._links.tcp._tcp_wire import Hello, cut, decode_hello, encode_head, encode_hello
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from paceline.errors import LinkUnavailable, PacelineError
from pacelinepb.v1 import peer_pb2

__all__ = ["SEEDS", "answer", "handed_over", "slots", "tcp_hello", "tcp_streams"]

_TICKET = b"t" * 16
_ARENA = 4096
"""Bytes of the segment that the writer has handed over, as number 1."""


def _noted(fault: Fault) -> None:
    """If the generation has failed, it is the writer whom that names, typed."""
    if fault.failed:
        error = fault.error()
        assert isinstance(error, PacelineError)
        assert error.ranks == (0,)


@cache
def _segments() -> tuple[Segment, Segment]:
    """A control segment and one of an arena; made once, for each costs more than a run."""
    control, shared = Segment(CONTROL_BYTES), Segment(_ARENA)
    control.back(STAGING_AT)
    shared.back(_ARENA)
    return control, shared


def slots(data: bytes) -> None:
    """Whatever a writer puts into slots and announces, the reader gets frames within bounds, or says who broke what.

    Chunks: the counts that are rung, one after the other; an announcement; then slots.
    """
    rings, word, *written = [*unpack_chunks(data), b"", b""]
    control, shared = _segments()
    flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
    bell, room = os.eventfd(0, flags), os.eventfd(0, flags)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    fault = Fault(1, 1, 0.0)
    incoming = ShmIncoming(fault, PEERS[0], _loop(), theirs, attach(control.fd, CONTROL_BYTES), os.dup(bell), room)
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [shared.fd]))]
        ours.sendmsg([ANNOUNCEMENT.pack(1, _ARENA)], rights)
        if word:
            ours.sendmsg([word], rights)
        for number, slot in enumerate(written[:SLOTS]):
            at = SLOTS_AT + number * SLOT_BYTES
            control.memory[at : at + len(slot[:SLOT_BYTES])] = slot[:SLOT_BYTES]
        place = memoryview(bytearray(100))
        for number, count in enumerate(rings[:4]):
            with suppress(BlockingIOError):
                os.eventfd_write(bell, count if count < 255 else 2**64 - 2)
            for _ in range(count + 1):
                got = incoming.recv(0.0, place if number % 2 else None)
                assert (got.kind, got.generation) == (FrameKind.DATA, 1)
                assert len(bytes(got.payload)) <= MAX_FRAME_BYTES
                assert len(got.signature) <= MAX_SIGNATURE_BYTES
                incoming.release()
    except LinkTimeout:
        assert not fault.failed
    except (PacelineError, LinkEnded):
        pass
    finally:
        incoming.close()
        ours.close()
        os.close(bell)
    _noted(fault)


@cache
def _host() -> handover.ShmHost:
    async def make() -> handover.ShmHost:
        return handover.ShmHost(_loop())

    return _loop().run_until_complete(make())


def handed_over(data: bytes) -> None:
    """An opening is the one that is due, or is refused with a short reason; what came with it is closed then.

    The first byte picks the descriptors that come along.
    """
    control, shared = _segments()
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    right = [control.fd, bell, bell]
    given = [right, right[:2], [], [shared.fd, bell, bell], [bell, bell, bell], right[::-1]]
    picked = given[data[0] % len(given)] if data else []
    host, made = _host(), list[ShmIncoming]()
    host.expect(_TICKET, made.append, Fault(1, 1, 0.0), PEERS[0])
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setblocking(False)
    before = len(os.listdir("/proc/self/fd"))
    with there:
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", picked))] if picked else []
            there.sendmsg([data[1:]], rights)
            host._strangers[here] = _loop().call_later(60.0, _loop().stop)
            host._open(here)
            if made:
                assert data[1:] == _opening()
                assert picked == right
                assert there.recv(300) == handover._ACCEPTED
                made[0].close()
            elif data[1:]:  # an empty message is an end
                assert 0 < len(there.recv(300)) <= 200
            assert not host._strangers
            assert here.fileno() < 0
            assert len(os.listdir("/proc/self/fd")) <= before - 1
        finally:
            host.forget(_TICKET)
            os.close(bell)


def _opening(ticket: bytes = _TICKET, **fields: Any) -> bytes:
    words = {"magic": handover._MAGIC, "layout": LAYOUT, "length": len(ticket), "size": CONTROL_BYTES, **fields}
    return handover._OPENING.pack(*words.values()) + ticket


def tcp_hello(data: bytes) -> None:
    """What is accepted is what `encode_hello` makes, of a stream that can be."""
    try:
        found = decode_hello(data)
    except FrameError:
        return
    assert encode_hello(found) == data
    assert 0 <= found.index < found.streams <= 16


class _Said(Stream):
    """A stream on which these bytes have come, and now and then the next must be waited for."""

    def __init__(self, data: bytes, fd: int) -> None:
        self.data = memoryview(data)
        self.fd = fd
        self.waits = 0

    def read(self, into: memoryview) -> int:
        self.waits += 1
        if self.waits % 3 == 0:
            return -1
        count = min(len(into), len(self.data), 1 + 977 * self.waits)
        into[:count] = self.data[:count]
        self.data = self.data[count:]
        return count

    def close(self) -> None:
        """There is none."""


@without_checksums()
def tcp_streams(data: bytes) -> None:
    """Frames are those that the bytes spell, cut over the streams as they must be; anything else ends the half.

    The first byte is the number of streams, and how much is asked for in a place of the caller's.
    """
    count = 1 + (data[0] % 4 if data else 0)
    place = memoryview(bytearray(data[0] >> 2 if data else 0))
    said = [*unpack_chunks(data[1:]), *[b""] * count][:count]
    bell = os.eventfd(1, os.EFD_NONBLOCK)  # always readable: nobody sleeps
    fault = Fault(1, 1, 0.0)
    streams = [_Said(chunk, bell) for chunk in said]
    half = TcpIncoming(streams, _loop(), fault, "the peer")
    spelled = [bytearray() for _ in range(count)]
    frames = 0
    try:
        for _ in range(200):
            try:
                frame = half.recv(0.0, place)
            except LinkTimeout:
                continue
            for number, (index, begin, end) in enumerate(cut(len(frame.payload), count, frames)):
                head = b"" if number else encode_head(frame)
                spelled[index] += head + bytes(frame.payload)[begin:end]
            frames += 1
            assert frame.generation == 1
            half.release()
    except LinkEnded:
        pass
    finally:
        half.close()
        os.close(bell)
    assert not fault.failed
    assert all(chunk.startswith(spelled_there) for chunk, spelled_there in zip(said, spelled, strict=True))


def answer(data: bytes) -> None:
    """Whatever a door answers, the way out is opened or is not there, and gRPC is left."""
    try:
        said = peer_pb2.HelloResponse.FromString(data)
    except DecodeError:
        return
    peer = Peer(0, "member-0", "host-0", "127.0.0.1:1", 0, "node")
    dialled: list[int] = []

    async def reach(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
        dialled.append(port)
        raise ConnectionRefusedError(111, "refused")

    async def attempt() -> None:
        openings = LinkKinds(Config(), IN_THE_CLEAR).openings("node", 1, Fault(1, 1, 0.0))
        with mock.patch("paceline._links.tcp._tcp_kind._reach", reach):
            half = await openings.open(said, peer, Outbox(_loop()))
        assert isinstance(half, GrpcOutgoing), "nobody listens, and it is open"

    with suppress(LinkUnavailable):
        _loop().run_until_complete(attempt())
    assert all(0 <= port < 65536 for port in dialled)


def _slot(*, signature: bytes = b"", payload: bytes = b"", **fields: int) -> bytes:
    words = {"number": 0, "kind": 1, "part": 0, "generation": 1, "operation": 1, "place": 1, "words": len(signature),
             "size": len(payload), "segment": 0, "offset": 0, **fields}  # fmt: skip
    room = b"" if not payload else signature + bytes(MAX_SIGNATURE_BYTES - len(signature)) + payload
    return DESCRIPTOR.pack(*words.values()) + (room or signature)


def _slot_seeds() -> Sequence[bytes]:
    small = _slot(signature=b"barrier", payload=b"x" * 100)
    second = _slot(number=1, payload=b"y" * 7)
    staged = _slot(number=1, place=2, size=10_000, offset=STAGING_AT)
    lent = _slot(number=2, place=3, size=_ARENA, segment=1)
    other = _slot(number=0, place=3, size=10, segment=7, offset=5)
    return [
        pack_chunks([bytes([2]), b"", small, second]),
        pack_chunks([bytes([1, 2]), b"", small, staged, lent]),
        pack_chunks([bytes([1]), ANNOUNCEMENT.pack(7, _ARENA), other]),
        pack_chunks([bytes([1, 1]), ANNOUNCEMENT.pack(1, 0), small, lent]),
        pack_chunks([bytes([255]), b"x", small]),
    ]


def _handover_seeds() -> Sequence[bytes]:
    openings = [
        _opening(),
        _opening(b"another"),
        _opening(layout=LAYOUT + 1),
        _opening(size=4096),
        _opening(magic=b"HTTP"),
    ]
    return [bytes([which]) + opening for which in range(6) for opening in openings]


def _hello_seeds() -> Sequence[bytes]:
    return [encode_hello(Hello(_TICKET, index, streams)) for index, streams in ((0, 1), (3, 4), (15, 16))]


@without_checksums()
def _stream_seeds() -> Sequence[bytes]:
    frames = [
        Frame(FrameKind.DATA, 1, 1, 0, b"all_reduce op=sum float32[4]", bytes(16)),
        Frame(FrameKind.DATA, 1, 1, 1, b"", b"x" * 3000),
        Frame(FrameKind.DATA, 1, 2, 0, b"barrier", b""),
    ]
    one = b"".join(encode_head(frame) + bytes(frame.payload) for frame in frames)
    two = [b"".join(encode_head(frame) + bytes(frame.payload) for frame in frames[which::2]) for which in (0, 1)]
    return [
        b"\0" + pack_chunks([one]),
        bytes([16 << 2]) + pack_chunks([one]),
        b"\1" + pack_chunks(two),
    ]


def _answer_seeds() -> Sequence[bytes]:
    answers = [
        peer_pb2.HelloResponse(chosen=peer_pb2.LINK_KIND_TCP, ticket=_TICKET, tcp_port=40_000),
        peer_pb2.HelloResponse(chosen=peer_pb2.LINK_KIND_SHM, ticket=_TICKET, shm_name="paceline-00ff"),
        peer_pb2.HelloResponse(chosen=peer_pb2.LINK_KIND_GRPC, ticket=_TICKET),
        peer_pb2.HelloResponse(chosen=peer_pb2.LINK_KIND_TCP, ticket=b"short", tcp_port=70_000),
        peer_pb2.HelloResponse(chosen=peer_pb2.LINK_KIND_SHM, ticket=bytes(70_000), shm_name="x" * 200),
    ]
    return [each.SerializeToString() for each in answers]


SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {
    "slots": _slot_seeds,
    "handover": _handover_seeds,
    "tcp_hello": _hello_seeds,
    "tcp_streams": _stream_seeds,
    "answer": _answer_seeds,
}
