"""The front door of a worker, without sockets: what strangers say in `Hello`, and what comes on a stream of frames."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

from google.protobuf.message import DecodeError

from fuzz.decoders import SEEDS as DECODERS
from fuzz.wire import PEERS, pack_chunks, unpack_chunks, without_checksums
from paceline._base.addresses import parse_endpoint
from paceline._base.proofs import DoorKey
from paceline._base.rpc import EOF
from paceline._links.base import MAX_GROUP_NAME, LinkEnded, Peer, Purpose
from paceline._links.fault import MAX_TEXT, Fault
from paceline._links.frame import Frame, FrameKind, encode
from paceline._links.grpc_door import Door, DoorLimits, Intake, _relay
from paceline._links.grpc_kind import GrpcIncoming
from paceline._links.grpc_knock import MAX_ADDRESS_BYTES, Knocks
from paceline._links.registry import LinkKinds
from paceline._links.shm.shm_kind import ShmKind
from paceline._links.tcp import TcpKind
from paceline.config import MAX_STREAMS, Config
from paceline.credentials import IN_THE_CLEAR, Credentials
from paceline.errors import PacelineError
from pacelinepb import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from pacelinepb.memory_guard import Callers
from pacelinepb.v1 import peer_pb2

__all__ = ["SEEDS", "abort", "hello", "knock", "proof", "stream"]

_JOB = "fuzzed"

_SECRET = bytes(range(32))

_NODES = ("node", "another")
"""Of the peers; the door is on the first."""


class _Refused(Exception):
    """As grpc ends a call that is aborted."""


class _Half(GrpcIncoming):
    """Takes in whatever comes."""

    def __init__(self) -> None:
        super().__init__(_loop(), Fault(1, 1, verdict_timeout=0.0))
        self.frames: list[Frame] = []

    async def put(self, frame: Frame) -> None:
        self.frames.append(frame)


class _Link:
    def __init__(self) -> None:
        self.ended = False

    def claim(self) -> bool:
        return True

    def receive_by(self, half: _Half) -> None:
        assert not half.frames

    def end_in(self, error: LinkEnded, frames: int | None = None) -> None:
        assert frames is None or 0 <= frames < 1 << 64
        self.ended = True


class _House:
    """Member 1 of a generation of 2."""

    generation = 1
    version = PROTOCOL_VERSION
    member_id = "member-1"
    node = "node"
    size = 2
    neighbours = 1

    def __init__(self) -> None:
        self.fault = Fault(1, 1, verdict_timeout=0.0)
        self.link = _Link()
        self.lost: list[int] = []

    def peer_by_id(self, member_id: str) -> Peer | None:
        return next((replace(peer, node=_NODES[peer.rank]) for peer in PEERS if peer.member_id == member_id), None)

    def link_from(self, rank: int, purpose: Purpose, group: str) -> Any:
        assert len(group.encode()) <= MAX_GROUP_NAME
        assert isinstance(purpose, Purpose)
        return self.link

    def peer_leaves(self, rank: int) -> None:
        assert rank == 0

    def peer_ended(self, rank: int, error: LinkEnded) -> None:
        self.lost.append(rank)


class _Listening:
    """What a door has for halves, as if it listened."""

    name = "paceline-0"
    port = 40_000

    def __init__(self) -> None:
        self.expected: list[tuple[Any, ...]] = []

    def expect(self, ticket: bytes, *rest: Any) -> None:
        assert len(ticket) == 16
        self.expected.append(rest)


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

    def time_remaining(self) -> float:
        return 0.3

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

    shm, tcp = _Listening(), _Listening()

    async def knock() -> Any:
        door = Door(_JOB, IN_THE_CLEAR, limits=DoorLimits(ticket_s=0.0))
        door.kinds.of(ShmKind).host, door.kinds.of(TcpKind).host = shm, tcp  # type: ignore[assignment]
        door.enter(house)
        return await door._hello(request, context)

    try:
        answer = _loop().run_until_complete(knock())
    except _Refused:
        assert context.refusal.details
        assert not shm.expected + tcp.expected
    else:
        assert len(answer.ticket) == 16
        assert request.protocol_version in (OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION)
        assert request.job == _JOB
        assert (request.to_member, request.generation) == ("member-1", 1)
        assert request.from_member in ("member-0", "member-1")
        _check_chosen(request, answer, shm, tcp)
    assert not house.fault.failed


def _check_chosen(request: Any, answer: Any, shm: _Listening, tcp: _Listening) -> None:
    """What was offered, and what both can have: the first of it; and that alone is expected."""
    shares = request.from_member == "member-0"
    has = {
        peer_pb2.LINK_KIND_GRPC: True,
        peer_pb2.LINK_KIND_TCP: request.tcp_streams <= MAX_STREAMS,
        peer_pb2.LINK_KIND_SHM: shares,
    }
    assert answer.chosen == next(kind for kind in request.offered if has.get(kind))
    assert len(shm.expected) == (answer.chosen == peer_pb2.LINK_KIND_SHM)
    assert len(tcp.expected) == (answer.chosen == peer_pb2.LINK_KIND_TCP)
    assert all(1 <= streams <= MAX_STREAMS for streams, *_ in tcp.expected)


@without_checksums()
def stream(data: bytes) -> None:
    """All that is let in is a frame of this generation; anything else accuses its sender, or breaks the link."""
    messages = list(unpack_chunks(data))
    house, context, half = _House(), _Context(messages, b"ticket"), _Half()

    async def deliver() -> None:
        kinds = LinkKinds(Config(), IN_THE_CLEAR)
        kinds._keep(b"ticket", half)
        intake = Intake(kinds, Callers(1.0))
        intake.expect(b"ticket", house, PEERS[0], house.link)  # type: ignore[arg-type]
        await intake.serve(None, context)

    try:
        _loop().run_until_complete(deliver())
    except _Refused:
        if not house.lost:  # a wrong checksum is nobody's fault
            _check_failed(house.fault)
    else:
        assert house.link.ended or house.lost == [0] or house.fault.failed
    assert len(half.frames) <= len(messages)
    assert all(frame.generation == 1 and frame.kind is FrameKind.DATA for frame in half.frames)


def knock(data: bytes) -> None:
    """A typed refusal, an answer, or, for who knows whose door this is, a knock at what can be the address of one."""
    try:
        request = peer_pb2.KnockRequest.FromString(data)
    except DecodeError:
        return  # it is refused before
    context = _Context()
    dialled: list[str] = []

    def no_channel(self: Credentials, address: str, options: Any) -> Any:
        dialled.append(address)
        raise _Refused

    with mock.patch.object(Credentials, "member_channel", no_channel):
        try:
            answer = _loop().run_until_complete(
                Knocks(_JOB, lambda: "member-1", IN_THE_CLEAR)._answer(request, context)
            )
        except _Refused:
            assert dialled or context.refusal.details
        else:
            assert not answer.trouble
            assert not request.address
    if (request.job, request.to_member) != (_JOB, "member-1"):
        assert not dialled
        assert context.refusal is not None
    for address in dialled:
        assert parse_endpoint(address).port > 0
        assert len(address.encode()) <= MAX_ADDRESS_BYTES


def proof(data: bytes) -> None:
    """A proof at a door: the one that a member made, once, and no other."""
    good, door = _proof(), DoorKey()
    door.learn(_SECRET, "member-1")
    for is_first in (True, False):
        let_in = not door.check("KnockRequest", peer_pb2.KnockRequest().SerializeToString(), data)
        assert let_in is (is_first and data == good)
    assert len(door._seen) == (data == good)


def _proof() -> bytes:
    member = DoorKey()
    member.learn(_SECRET, "member-0")
    return member.prove(peer_pb2.KnockRequest())


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
        {"tcp_streams": 7},
        {"from_member": "member-1"},
    ):
        other = peer_pb2.HelloRequest()
        other.CopyFrom(right)
        other.MergeFrom(peer_pb2.HelloRequest(**change))
        found.append(other.SerializeToString())
    grpc, tcp, shm = peer_pb2.LINK_KIND_GRPC, peer_pb2.LINK_KIND_TCP, peer_pb2.LINK_KIND_SHM
    for offered in ([shm, tcp, grpc], [tcp, grpc], [shm], [tcp], [grpc, shm], []):
        for streams in (0, 16, 17):
            other = peer_pb2.HelloRequest()
            other.CopyFrom(right)
            del other.offered[:]
            other.MergeFrom(peer_pb2.HelloRequest(offered=offered, tcp_streams=streams))
            found.append(other.SerializeToString())
    return found


@without_checksums()
def _stream_seeds() -> Sequence[bytes]:
    part = encode(Frame(FrameKind.DATA, 1, 1, 0, b"barrier", b"x" * 9))
    end = encode(Frame(FrameKind.CLOSE, 1, 0, 0, b"", b""))
    words = [encode(Frame(FrameKind.ABORT, 1, 0, 0, b"", word)) for word in DECODERS["verdict"]()]
    return [pack_chunks([part, part, end]), pack_chunks([part]), *(pack_chunks([part, word, end]) for word in words)]


def _knock_seeds() -> Sequence[bytes]:
    addresses = ("", "10.0.0.1:5000", "[fd00::1]:5000", "node-b:1", "10.0.0.1:0", "10.0.0.1", "a b:1", "x" * 600 + ":1")
    known = [peer_pb2.KnockRequest(job=_JOB, from_member="m", to_member="member-1", address=each) for each in addresses]
    strangers = [
        peer_pb2.KnockRequest(job="x", from_member="m", to_member="member-1", address="10.0.0.1:5000"),
        peer_pb2.KnockRequest(job=_JOB, from_member="m", to_member="member-0", address="10.0.0.1:5000"),
    ]
    return [request.SerializeToString() for request in known + strangers]


SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {
    "abort": DECODERS["verdict"],
    "hello": _hello_seeds,
    "stream": _stream_seeds,
    "knock": _knock_seeds,
    "proof": lambda: [_proof(), _proof()[:40], _proof() + b"x"],
}
