"""The front door of a worker, without sockets: what strangers say in `Hello`, and what comes on a stream of frames."""

from __future__ import annotations

import asyncio
import atexit
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest import mock

from google.protobuf.message import DecodeError

from fuzz.decoders import SEEDS as DECODERS
from fuzz.wire import PEERS, pack_chunks, unpack_chunks
from paceline._grpc import EOF
from paceline.credentials import IN_THE_CLEAR
from paceline.errors import PacelineError
from paceline.links.base import MAX_GROUP_NAME, LinkEnded, Peer, Purpose
from paceline.links.fault import Fault
from paceline.links.frame import Frame, FrameKind, encode
from paceline.links.grpc_door import MAX_TEXT, Door, _relay
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.v1 import peer_pb2

__all__ = ["SEEDS", "abort", "hello", "stream"]

_JOB = "fuzzed"


class _Refused(Exception):
    """As grpc ends a call that is aborted."""


class _Inbox:
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.ended = False

    async def put(self, frame: Frame) -> None:
        self.frames.append(frame)

    def end(self, error: LinkEnded) -> None:
        self.ended = True


class _House:
    """Member 1 of a generation of 2."""

    generation = 1
    member_id = "member-1"
    size = 2

    def __init__(self) -> None:
        self.fault = Fault(1, 1, verdict_timeout=0.0)
        self.box = _Inbox()
        self.lost: list[int] = []

    def peer_by_id(self, member_id: str) -> Peer | None:
        return next((peer for peer in PEERS if peer.member_id == member_id), None)

    def inbox(self, rank: int, purpose: Purpose, group: str) -> Any:
        assert len(group.encode()) <= MAX_GROUP_NAME
        assert isinstance(purpose, Purpose)
        return self.box

    def peer_leaves(self, rank: int) -> None:
        assert rank == 0

    def peer_ended(self, rank: int, error: LinkEnded) -> None:
        self.lost.append(rank)


class _Context:
    """A call, as a handler sees it."""

    def __init__(self, messages: Sequence[bytes] = (), ticket: bytes = b"") -> None:
        self._messages = list(messages)
        self._ticket = ticket
        self.written: list[Any] = []
        self.refusal: Any = None

    def invocation_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return (("paceline-ticket-bin", self._ticket),)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> Any:
        return self._messages.pop(0) if self._messages else EOF

    async def write(self, message: Any) -> None:
        self.written.append(message)

    async def abort_with_status(self, status: Any) -> None:
        self.refusal = status
        raise _Refused


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all runs: making one costs more than a run."""
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def _check_failed(fault: Fault) -> None:
    assert fault.failed
    error = fault.error()
    assert isinstance(error, PacelineError)
    assert error.ranks in ((0,), (1,))
    assert len(str(error)) <= MAX_TEXT + 200


def abort(data: bytes) -> None:
    """Whatever a peer's ABORT frame holds, the generation ends, typed, and somebody who is there is accused."""
    house = _House()
    _relay(house, PEERS[0], Frame(FrameKind.ABORT, 1, 0, 0, b"", memoryview(data)))
    _check_failed(house.fault)


def hello(data: bytes) -> None:
    """A ticket for whoever belongs here; a typed refusal for all others; and no failure."""
    try:
        request = peer_pb2.HelloRequest.FromString(data)
    except DecodeError:
        return  # grpc refuses it
    house, context = _House(), _Context()

    async def knock() -> Any:
        door = Door(_JOB, IN_THE_CLEAR)
        door.enter(house)
        return await door._hello(request, context)

    try:
        with mock.patch("paceline.links.grpc_door.TICKET_LIFETIME", 0.0):
            answer = _loop().run_until_complete(knock())
    except _Refused:
        assert context.refusal.details
    else:
        assert len(answer.ticket) == 16
        assert (request.protocol_version, request.job) == (PROTOCOL_VERSION, _JOB)
        assert (request.to_member, request.generation) == ("member-1", 1)
        assert request.from_member in ("member-0", "member-1")
    assert not house.fault.failed


def stream(data: bytes) -> None:
    """All that is let in is a frame of this generation; anything else accuses its sender."""
    messages = list(unpack_chunks(data))
    house, context = _House(), _Context(messages, b"ticket")

    async def deliver() -> None:
        door = Door(_JOB, IN_THE_CLEAR)
        door._tickets[b"ticket"] = (house, PEERS[0], house.box, time.monotonic() + 60.0)  # type: ignore[assignment]
        await door._frames(None, context)

    try:
        _loop().run_until_complete(deliver())
    except _Refused:
        _check_failed(house.fault)
        assert house.fault.error().ranks in ((0,), (1,))
    else:
        assert house.box.ended or house.lost == [0] or house.fault.failed
    assert len(house.box.frames) <= len(messages)
    assert all(frame.generation == 1 and frame.kind is FrameKind.DATA for frame in house.box.frames)


def _hello_seeds() -> Sequence[bytes]:
    right = peer_pb2.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        job=_JOB,
        from_member="member-0",
        to_member="member-1",
        generation=1,
        purpose=peer_pb2.PURPOSE_COLLECTIVE,
        offered=[peer_pb2.LINK_KIND_GRPC],
    )
    found = [right.SerializeToString()]
    for change in (
        {"group": "split1"},
        {"group": "é" * 200},
        {"group": "x" * 257},
        {"generation": 2},
        {"purpose": 7},
        {"job": "x"},
    ):
        other = peer_pb2.HelloRequest()
        other.CopyFrom(right)
        other.MergeFrom(peer_pb2.HelloRequest(**change))  # type: ignore[arg-type]
        found.append(other.SerializeToString())
    return found


def _stream_seeds() -> Sequence[bytes]:
    part = encode(Frame(FrameKind.DATA, 1, 1, 0, b"barrier", b"x" * 9))
    end = encode(Frame(FrameKind.CLOSE, 1, 0, 0, b"", b""))
    words = [encode(Frame(FrameKind.ABORT, 1, 0, 0, b"", word)) for word in DECODERS["verdict"]()]
    return [pack_chunks([part, part, end]), pack_chunks([part]), *(pack_chunks([part, word, end]) for word in words)]


SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {
    "abort": DECODERS["verdict"],
    "hello": _hello_seeds,
    "stream": _stream_seeds,
}
