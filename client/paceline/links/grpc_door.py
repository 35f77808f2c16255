"""The front door of a worker: its PeerService, where members authenticate, negotiate and deliver frames.

Nothing of a stranger gets further than the door: a link needs a ticket, a ticket needs the ids of two members of the
generation, and every frame is checked before it is queued (I4, I9).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections import Counter
from typing import Any, NoReturn, Protocol

from google.protobuf.message import DecodeError

from paceline._grpc import EOF, aio, grpc
from paceline.credentials import Credentials
from paceline.errors import LinkUnavailable
from paceline.links.base import MAX_GROUP_NAME, LinkEnded, Peer, Purpose
from paceline.links.fault import Fault, Suspicion
from paceline.links.frame import MAX_FRAME_BYTES, Frame, FrameError, FrameKind, decode
from paceline.links.grpc_link import Inbox
from paceline.links.grpc_methods import MAX_REQUEST_BYTES, Requests
from paceline.links.grpc_refusal import refuse, shown
from paceline.links.grpc_state import StateWindow
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.v1 import peer_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason
from pacelinepb.v1.session_pb2 import Verdict

__all__ = ["Door", "Household"]

TICKET_LIFETIME = 10.0
"""Seconds for which a ticket is good (peer.proto)."""

MAX_TEXT = 2000
"""Characters of a peer's sentence that are believed."""

MAX_WAITING = 4096
"""Callers that wait for this worker to hear of its view."""

MAX_WAITING_EACH = 64
"""The same on one connection; one more is told at once, and knocks again."""

MAX_STREAMS = 1024
"""Calls of one connection at one time; more wait at the caller's. A member has one for each purpose of each group, and
those of the generation before for a moment."""

MAX_TICKETS = 4096
"""Unused tickets that a door remembers; one more and the oldest are forgotten."""

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + MAX_REQUEST_BYTES
"""Of any method: grpc has one limit for all. A frame that is too long is ours to refuse, by name of its sender; of one
that is longer than this grpc breaks the stream."""

_SERVICE = "pacelinepb.v1.PeerService"


class Household(Protocol):
    """What the door asks of those inside: one member's view of one generation."""

    generation: int
    member_id: str
    fault: Fault

    @property
    def size(self) -> int:
        """Number of members."""

    def peer_by_id(self, member_id: str) -> Peer | None:
        """The member with this id, None if it is not of this generation."""

    def inbox(self, rank: int, purpose: Purpose, group: str) -> Inbox | None:
        """Where frames from that rank go; None if there are too many groups."""

    def peer_leaves(self, rank: int) -> None:
        """That rank has said that it leaves in good order."""

    def peer_ended(self, rank: int, error: LinkEnded) -> None:
        """A stream from that rank ended out of order."""


class Door:
    """The PeerService of one worker. Everything runs on the loop that started it.

    Args:
        job: the job whose members may knock.
        credentials: by what members know each other: with TLS nobody gets in without a certificate of theirs.

    Attributes:
        window: where state is handed out.
    """

    def __init__(self, job: str, credentials: Credentials) -> None:
        self._job = job
        self._credentials = credentials
        self.window = StateWindow(job)
        self._server: aio.Server | None = None
        self._starting: asyncio.Future[None] | None = None
        self._inside: Household | None = None
        self._entered = asyncio.Event()
        self._tickets: dict[bytes, tuple[Household, Peer, Inbox, float]] = {}
        self._streams: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()
        self._requests = Requests()
        self._waiting: Counter[str] = Counter()  # by connection

    async def start(self, host: str, port: int) -> int:
        """Listens.

        Returns:
            The port, which is a free one if 0 was asked for.

        Raises:
            LinkUnavailable: the address cannot be bound.
        """
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", round(1000 * TICKET_LIFETIME)),
        ]
        self._server = aio.server(options=options)
        handlers = {
            "Hello": self._requests.unary_method(peer_pb2.HelloRequest, peer_pb2.HelloResponse, self._hello),
            # No deserializer: frames are decoded without a copy (frame.py).
            "Frames": grpc.stream_stream_rpc_method_handler(
                self._frames, response_serializer=peer_pb2.FramesResponse.SerializeToString
            ),
            **self.window.handlers(self._requests),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        _check_free(host, port, where)
        try:
            bound = self._credentials.add_port(self._server, where)
        except RuntimeError as error:
            raise LinkUnavailable(f"cannot listen for peers on {where}: {error}") from error
        self._starting = asyncio.ensure_future(self._server.start())
        await asyncio.shield(self._starting)
        return bound

    def enter(self, inside: Household) -> None:
        """Opens the door for the members of a generation; earlier ones are turned away from now on."""
        self._inside = inside
        self._entered.set()

    async def close(self, grace: float = 0.2) -> None:
        """Ends every stream with the word that all of it was taken in, then stops listening."""
        self._closing.set()
        self._entered.set()
        for stream in list(self._streams):
            stream.cancel()
        if self._starting is not None:  # grpc crashes if a server is stopped before, or while, it starts
            await asyncio.wait([self._starting])
        if self._server is not None:
            await self._server.stop(grace)

    async def _hello(self, request: peer_pb2.HelloRequest, context: Any) -> peer_pb2.HelloResponse:
        if request.protocol_version != PROTOCOL_VERSION:
            text = f"this worker speaks version {PROTOCOL_VERSION} of the protocol, not {request.protocol_version}"
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, ErrorReason.ERROR_REASON_VERSION, text)
        if request.job != self._job:
            text = f"this is no member of job {shown(request.job)}"  # of which it is, is no stranger's business
            await refuse(context, grpc.StatusCode.NOT_FOUND, ErrorReason.ERROR_REASON_NOT_FOUND, text)
        known = self.window.member_id  # a caller who means somebody else need not wait for our view
        if known and request.to_member != known:
            await _not_this_member(request, context)
        inside = await self._inside_by(request.generation, context.peer())
        if inside is None:
            text = "this worker is leaving" if self._closing.is_set() else "this worker has not heard of that view yet"
            await refuse(context, grpc.StatusCode.UNAVAILABLE, ErrorReason.ERROR_REASON_DRAINING, text)
        if request.to_member != inside.member_id:
            await _not_this_member(request, context)
        if request.generation != inside.generation:
            text = f"generation {request.generation} is over; this worker is in {inside.generation}"
            reason = ErrorReason.ERROR_REASON_STALE_GENERATION
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, reason, text)
        peer = inside.peer_by_id(request.from_member)
        if peer is None:
            text = f"member {shown(request.from_member)} is not in generation {inside.generation}"
            await refuse(context, grpc.StatusCode.NOT_FOUND, ErrorReason.ERROR_REASON_NOT_FOUND, text)
        if peer_pb2.LINK_KIND_GRPC not in request.offered or int(request.purpose) not in Purpose.__members__.values():
            text = "no kind of link that both sides have"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        inbox = None
        if len(request.group.encode()) <= MAX_GROUP_NAME:
            inbox = inside.inbox(peer.rank, Purpose(request.purpose), request.group)
        if inbox is None:
            text = "too many groups, or a name of one that is too long"
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorReason.ERROR_REASON_LIMIT, text)
        return peer_pb2.HelloResponse(chosen=peer_pb2.LINK_KIND_GRPC, ticket=self._issue(inside, peer, inbox))

    async def _inside_by(self, generation: int, connection: str) -> Household | None:
        """The view of this worker, once it is that of the generation or a later one; None if that takes too long.

        The caller may have heard of its view first; ours is on its way then. A stranger must not wait here for ever.
        """
        if self._is_early(generation):
            if self._waiting.total() >= MAX_WAITING or self._waiting[connection] >= MAX_WAITING_EACH:
                return None
            self._waiting[connection] += 1
            try:
                async with asyncio.timeout(TICKET_LIFETIME):
                    while self._is_early(generation):
                        self._entered.clear()
                        await self._entered.wait()
            except TimeoutError:
                return None
            finally:
                self._waiting[connection] -= 1
                if not self._waiting[connection]:
                    del self._waiting[connection]
        return None if self._closing.is_set() else self._inside

    def _is_early(self, generation: int) -> bool:
        return not self._closing.is_set() and (self._inside is None or self._inside.generation < generation)

    def _issue(self, inside: Household, peer: Peer, inbox: Inbox) -> bytes:
        now = time.monotonic()
        if len(self._tickets) >= MAX_TICKETS:
            self._tickets = {key: entry for key, entry in self._tickets.items() if entry[3] > now}
            while len(self._tickets) >= MAX_TICKETS:
                self._tickets.pop(next(iter(self._tickets)))
        ticket = secrets.token_bytes(16)
        self._tickets[ticket] = (inside, peer, inbox, now + TICKET_LIFETIME)
        return ticket

    async def _frames(self, _: Any, context: Any) -> None:
        ticket = dict(context.invocation_metadata()).get("paceline-ticket-bin", b"")
        inside, peer, inbox, expires = self._tickets.pop(ticket, (None, None, None, 0.0))
        if inside is None or peer is None or inbox is None or expires < time.monotonic() or self._closing.is_set():
            text = "frames need a fresh ticket from Hello"
            await refuse(context, grpc.StatusCode.UNAUTHENTICATED, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        frames, whole = 0, False
        try:
            await context.write(peer_pb2.FramesResponse(accepted=peer_pb2.Accepted()))
            while (data := await context.read()) is not EOF:
                frame = decode(data)
                if frame.generation != inside.generation:
                    text = f"a frame of generation {frame.generation} came to generation {inside.generation}"
                    _accuse(inside.fault, peer, f"{peer} broke the protocol: {text}")
                    reason = ErrorReason.ERROR_REASON_STALE_GENERATION
                    await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, reason, text)
                if whole and frame.kind is not FrameKind.ABORT:  # its generation may fail while it leaves
                    text = f"a frame of kind {frame.kind.name} came after the last"
                    _accuse(inside.fault, peer, f"{peer} broke the protocol: {text}")
                    reason = ErrorReason.ERROR_REASON_BAD_REQUEST
                    await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, reason, text)
                frames += 1
                if frame.kind in (FrameKind.CLOSE, FrameKind.LEAVE):
                    whole = True
                    if frame.kind is FrameKind.LEAVE:
                        inside.peer_leaves(peer.rank)
                elif frame.kind is FrameKind.ABORT:
                    _relay(inside, peer, frame)
                else:
                    await inbox.put(frame)
            if not whole:
                inside.peer_ended(peer.rank, LinkEnded(f"the link from {peer} ended"))
                return
            inbox.end(LinkEnded(f"{peer} left", orderly=True))
            # Last of all: whoever reads this word may hang up at once, and that cancels what still runs here.
            await context.write(peer_pb2.FramesResponse(drained=peer_pb2.Drained(frames=frames)))
        except asyncio.CancelledError:
            if whole:
                raise
            if not self._closing.is_set():  # the connection broke under the stream
                inside.peer_ended(peer.rank, LinkEnded(f"the link from {peer} ended"))
                raise
            await context.write(peer_pb2.FramesResponse(drained=peer_pb2.Drained(frames=frames)))
        except FrameError as error:
            _accuse(inside.fault, peer, f"{peer} broke the protocol: it sent what is no frame: {error}")
            text = f"no frame: {error}"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        finally:
            self._streams.discard(task)


async def _not_this_member(request: peer_pb2.HelloRequest, context: Any) -> NoReturn:
    text = f"this is not member {shown(request.to_member)}"  # whose door it is, is no stranger's business
    await refuse(context, grpc.StatusCode.NOT_FOUND, ErrorReason.ERROR_REASON_NOT_FOUND, text)


def _relay(inside: Household, peer: Peer, frame: Frame) -> None:
    """Takes over what a peer suspects, if it makes sense."""
    try:
        word = Verdict.FromString(bytes(frame.payload))
    except (DecodeError, ValueError):
        _accuse(inside.fault, peer, f"{peer} broke the protocol: it sent an abort that cannot be read")
        return
    accused = word.culprits[0] if word.culprits else peer.rank
    if accused >= inside.size or word.generation != inside.generation:
        _accuse(inside.fault, peer, f"{peer} broke the protocol: it sent an abort that makes no sense")
        return
    text = word.text[:MAX_TEXT]
    inside.fault.suspect(Suspicion(word.reason, accused, word.operation, text, relayed=True))


def _check_free(host: str, port: int, where: str) -> None:
    """Asks the kernel first: grpc says only that it failed, and writes a line of its own on the terminal."""
    if not port:
        return
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        for family, kind, protocol, _, target in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
                probe.listen()
    except OSError as error:
        raise LinkUnavailable(f"cannot listen for peers on {where}: {error.strerror or error}") from None


def _accuse(fault: Fault, peer: Peer, text: str) -> None:
    fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL, peer.rank, 0, text))
