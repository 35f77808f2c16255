"""The door of a worker: its PeerService, where members authenticate, negotiate and deliver frames.

A stranger gets no further than the door: a link needs a ticket, a ticket needs the ids of two members of the
generation, and every frame is checked before it is queued (I4, I9).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from google.protobuf.message import DecodeError

from paceline._base.addresses import is_exhausted
from paceline._base.rpc import EOF, aio, grpc
from paceline._links.base import MAX_GROUP_NAME, LinkEnded, Peer, Purpose
from paceline._links.fault import MAX_TEXT, Fault, Suspicion
from paceline._links.frame import MAX_FRAME_BYTES, Frame, FrameDamaged, FrameError, FrameKind, decode
from paceline._links.grpc_kind import GrpcIncoming
from paceline._links.grpc_knock import LEAST_SECONDS, MAX_AT_ONCE, Knocks
from paceline._links.grpc_mesh import GrpcMesh
from paceline._links.grpc_methods import MAX_REQUEST_BYTES, RequestLimits, Requests, refuse, shown
from paceline._links.grpc_state import StateWindow
from paceline._links.kind import TICKET_BYTES, TICKET_LIFETIME, LinkContext
from paceline._links.member_link import MemberLink
from paceline._links.registry import OPEN_SECONDS, LinkKinds
from paceline.config import Config
from paceline.credentials import Credentials
from paceline.errors import LinkUnavailable
from paceline_protocol import has_our_frames
from pacelinepb import RELEASE
from pacelinepb.memory_guard import Callers, MemoryGuard
from pacelinepb.v1 import peer_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason
from pacelinepb.v1.session_pb2 import Verdict

_log = logging.getLogger("paceline.links")

MAX_WORD_BYTES = 4 * MAX_TEXT + 64
"""Longest `Verdict` in bytes that a peer may send with an abort: a text of `MAX_TEXT`, a rank, and a few numbers."""

MAX_TICKETS = 4096
"""Unused tickets that a door remembers. If there is one more, it forgets expired ones, or the oldest."""

MAX_STREAMS = 1024
"""Calls of one connection at one time; more wait at the caller. A member has one for each purpose of each group, and
for a moment the calls of the generation before."""

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + MAX_REQUEST_BYTES
"""Longest message of any method; grpc has one limit for all. We refuse a frame that is too long, and name its sender.
If a message is longer than this, grpc breaks the stream."""

LAST_WORD_SECONDS = 2.0
"""Seconds for the last message on each stream when the door closes. It is written at once unless this host is busy."""

STOP_SECONDS = 0.5
"""Seconds that a door waits for grpc's server to stop. grpc lets a write end first, and one to a host that is gone ends
after `DoorLimits.pong_s`. Meanwhile this member could not say where it is now, or leave."""

_SERVICE = "pacelinepb.v1.PeerService"

_DEFAULT = Config()


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    """Limits of a `Door` for its callers."""

    idle_s: float = 5.0
    """Seconds for which a connection may exist without a call; otherwise a stranger's thousand connections would use up
    all descriptors. No link is ever idle, whatever its kind: its Frames stream stays open."""

    ping_s: float = 60.0
    """Seconds of silence after which grpc pings a connection with calls. Without this, streams of a host that is gone
    would stay for ever."""

    pong_s: float = 20.0
    """Seconds that grpc waits for the answer to a ping, or `failure_timeout` if that is longer."""

    max_waiting: int = 4096
    """Callers that may wait until this worker hears of its view."""

    max_waiting_each: int = 64
    """The same on one connection. The door refuses one more at once, and the caller tries again."""

    ticket_s: float = TICKET_LIFETIME
    """Seconds for which a ticket is valid, and for which a caller may wait until this worker hears of its view.
    The hosts of tcp and shm have `ticket_s` of their own."""

    open_s: float = OPEN_SECONDS
    """Seconds for a half to open."""

    max_knocks: int = MAX_AT_ONCE
    """Most doors at which this worker knocks at one time, for others."""

    least_knock_s: float = LEAST_SECONDS
    """The fewest seconds for a knock."""

    requests: RequestLimits = field(default_factory=RequestLimits)
    """Limits of the requests that are being read."""


class Door:
    """The PeerService of one worker. Everything runs on the loop that started it.

    With TLS a caller needs a member's certificate. `window` serves the training state.
    """

    def __init__(
        self, job: str, credentials: Credentials, config: Config = _DEFAULT, *, limits: DoorLimits = DoorLimits()
    ) -> None:
        self._job = job
        self._credentials = credentials
        self._limits = limits
        self._pong_seconds = max(limits.pong_s, config.failure_timeout)
        self.kinds = LinkKinds(config, credentials, open_s=limits.open_s, ticket_s=limits.ticket_s)
        self.window = StateWindow(job)
        self._knocks = Knocks(
            job,
            lambda: self.window.member_id,
            credentials,
            max_at_once=limits.max_knocks,
            least_s=limits.least_knock_s,
        )
        self._servers: list[aio.Server] = []  # one; two while the address changes
        self._stopping: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Future[None] | None = None
        self._mesh: GrpcMesh | None = None
        self._entered = asyncio.Event()
        self._callers = Callers(limits.idle_s)
        self._guard: MemoryGuard | None = None
        self._intake = Intake(self.kinds, self._callers)
        self._closing = asyncio.Event()
        self._requests = Requests(credentials.door_key, self._callers, limits=limits.requests)
        self._waiting: Counter[str] = Counter()  # by connection

    def on_exhausted(self, hear: Callable[[BaseException], None]) -> None:
        """Registers a function to call when a call fails because this process lacks memory, threads or descriptors."""
        self._requests.on_exhausted = hear

    async def start(self, host: str, port: int) -> int:
        """Starts to listen, at a free port if `port` is 0; returns the port, or raises LinkUnavailable."""
        bound = await self._open(host, port)
        if self._credentials.ca is None:  # else strangers get no further than the handshake
            self._guard = MemoryGuard(self._callers, {bound})
        await self.kinds.start(host)
        return bound

    async def _open(self, host: str, port: int) -> int:
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", round(1000 * TICKET_LIFETIME)),
            ("grpc.max_connection_idle_ms", round(1000 * self._limits.idle_s)),
            ("grpc.keepalive_time_ms", round(1000 * self._limits.ping_s)),
            ("grpc.keepalive_timeout_ms", round(1000 * self._pong_seconds)),
            # This option ends a connection that does not answer: grpc ignores keepalive_timeout_ms while a ping of its
            # own, which measures the network, is under way, and waits a minute for that one.
            ("grpc.http2.ping_timeout_ms", round(1000 * self._pong_seconds)),
            ("grpc.http2.max_pings_without_data", 0),  # no limit: a door that receives frames has nothing to send
        ]
        server = aio.server(options=options)
        handlers = {
            "Hello": self._requests.unary_method(peer_pb2.HelloRequest, peer_pb2.HelloResponse, self._hello),
            # No deserializer: frames are decoded without a copy (frame.py).
            "Frames": grpc.stream_stream_rpc_method_handler(
                self._intake.serve, response_serializer=peer_pb2.FramesResponse.SerializeToString
            ),
            **self.window.handlers(self._requests),
            **self._knocks.handlers(self._requests),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        _check_free(host, port, where)
        try:
            bound = self._credentials.add_port(server, where)
        except RuntimeError as error:
            raise LinkUnavailable(f"cannot listen for peers on {where}: {error}") from error
        self._servers.append(server)
        self._starting = asyncio.ensure_future(server.start())
        await asyncio.shield(self._starting)
        return bound

    async def move(self, host: str, port: int, bound: Callable[[], None]) -> int:
        """Listens at another address, whose port it returns, and no more at the old one, which breaks the calls there.

        The mesh that is served, the tickets and the window stay as they are. `bound` is called when the new address is
        bound, before any call breaks. If it cannot be bound, this raises LinkUnavailable, and nothing has changed.
        """
        found = await self._open(host, port)
        if self._guard is not None:
            self._guard.ports = {found}
        bound()
        await self.kinds.start(host)
        *former, present = self._servers
        self._servers = [present]
        await self._stop(former, None)
        return found

    def enter(self, mesh: GrpcMesh) -> None:
        """Opens the door to the members of a generation. Calls for earlier generations are refused from now on."""
        self._mesh = mesh
        self._entered.set()

    async def close(self, grace: float = 0.2) -> None:
        """Ends every stream with the message that all its frames were received, then stops listening."""
        self._closing.set()
        self._entered.set()
        if self._guard is not None:
            self._guard.close()
        await self._intake.close()
        self.kinds.close()
        if self._starting is not None:  # grpc crashes if a server is stopped before, or while, it starts
            await asyncio.wait([self._starting])
        await self._stop(self._servers, grace)

    async def _stop(self, servers: list[aio.Server], grace: float | None) -> None:
        """Stops servers, and waits a while: they stop to listen at once, and their calls end after `grace` seconds."""
        self._stopping |= {asyncio.create_task(server.stop(grace)) for server in servers}
        if not self._stopping:
            return
        stopped, self._stopping = await asyncio.wait(self._stopping, timeout=(grace or 0.0) + STOP_SECONDS)
        if self._stopping:
            _log.info("the door has not closed yet, as grpc is still writing to hosts that are gone")
        for task in stopped:
            task.result()

    async def _hello(self, request: peer_pb2.HelloRequest, context: Any) -> peer_pb2.HelloResponse:
        if request.job != self._job:
            text = f"this is no member of job {shown(request.job)}"  # do not reveal our job to strangers
            await refuse(context, grpc.StatusCode.NOT_FOUND, ErrorReason.ERROR_REASON_NOT_FOUND, text)
        known = self.window.member_id  # a call for another member need not wait for our view
        if known and request.to_member != known:
            await _not_this_member(request, context)
        mesh = await self._mesh_by(request.generation, context.peer())
        if mesh is None:
            text = "this worker is leaving" if self._closing.is_set() else "this worker has not heard of that view yet"
            await refuse(context, grpc.StatusCode.UNAVAILABLE, ErrorReason.ERROR_REASON_DRAINING, text)
        if request.to_member != mesh.member_id:
            await _not_this_member(request, context)
        if request.generation != mesh.generation:
            text = f"generation {request.generation} is over; this worker is in {mesh.generation}"
            reason = ErrorReason.ERROR_REASON_STALE_GENERATION
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, reason, text)
        peer = mesh.peer_by_id(request.from_member)
        if peer is None:
            text = f"member {shown(request.from_member)} is not in generation {mesh.generation}"
            await refuse(context, grpc.StatusCode.NOT_FOUND, ErrorReason.ERROR_REASON_NOT_FOUND, text)
        if not has_our_frames(request.protocol_version, mesh.version):
            text = (
                f"{peer} speaks version {request.protocol_version} of the protocol in generation {mesh.generation}, "
                f"but its peer ({RELEASE}) was told version {mesh.version}"
            )
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, ErrorReason.ERROR_REASON_VERSION, text)
        if int(request.purpose) not in Purpose.__members__.values():
            text = "a link cannot have this purpose"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        link = None
        if len(request.group.encode()) <= MAX_GROUP_NAME:
            link = mesh.link_from(peer.rank, Purpose(request.purpose), request.group)
        if link is None:
            text = "too many groups, or the name of the group is too long"
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorReason.ERROR_REASON_LIMIT, text)
        ticket = secrets.token_bytes(TICKET_BYTES)
        answer = self.kinds.expect(request, LinkContext(peer, mesh.node, mesh.neighbours, mesh.fault), ticket)
        if answer is None:
            text = "the two sides have no kind of link in common"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        self._intake.expect(ticket, mesh, peer, link)
        return answer

    async def _mesh_by(self, generation: int, connection: str) -> GrpcMesh | None:
        """Returns this worker's mesh once it is of that generation or a later one; None if that takes too long.

        The caller may have heard of its view before us; then ours is on its way. A stranger must not wait here for
        ever.
        """
        if self._is_early(generation):
            limits = self._limits
            if self._waiting.total() >= limits.max_waiting or self._waiting[connection] >= limits.max_waiting_each:
                return None
            self._waiting[connection] += 1
            try:
                async with asyncio.timeout(limits.ticket_s):
                    while self._is_early(generation):
                        self._entered.clear()
                        await self._entered.wait()
            except TimeoutError:
                return None
            finally:
                self._waiting[connection] -= 1
                if not self._waiting[connection]:
                    del self._waiting[connection]
        return None if self._closing.is_set() else self._mesh

    def _is_early(self, generation: int) -> bool:
        return not self._closing.is_set() and (self._mesh is None or self._mesh.generation < generation)


async def _not_this_member(request: peer_pb2.HelloRequest, context: Any) -> NoReturn:
    text = f"this is not member {shown(request.to_member)}"  # do not reveal our member id to strangers
    await refuse(context, grpc.StatusCode.NOT_FOUND, ErrorReason.ERROR_REASON_NOT_FOUND, text)


def _check_free(host: str, port: int, where: str) -> None:
    """Tries the address itself: grpc says only that it failed, and writes a line of its own to the terminal."""
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


@dataclass(frozen=True, slots=True)
class _Admission:
    """The admission that a ticket grants: a peer's stream, with its half, to a link of the served mesh."""

    mesh: GrpcMesh
    peer: Peer
    link: MemberLink
    expires: float


class Intake:
    """Receives the streams of the callers to whom the door has given tickets. Runs on the loop."""

    def __init__(self, kinds: LinkKinds, callers: Callers) -> None:
        self._kinds = kinds
        self._callers = callers
        self._tickets: dict[bytes, _Admission] = {}
        self._streams: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()

    async def close(self) -> None:
        """Ends every stream with the message that all its frames were received, and accepts no more streams."""
        self._closing.set()
        streams = list(self._streams)
        for stream in streams:
            stream.cancel()
        if streams:  # a server that stops cuts off what is still being written, and this member would look dead
            await asyncio.wait(streams, timeout=LAST_WORD_SECONDS)

    def expect(self, ticket: bytes, mesh: GrpcMesh, peer: Peer, link: MemberLink) -> None:
        """Admits a stream with this ticket to the link. The stream says how the half with the same ticket ends."""
        now = time.monotonic()
        if len(self._tickets) >= MAX_TICKETS:
            stale = [key for key, entry in self._tickets.items() if entry.expires <= now]
            for old in stale or [next(iter(self._tickets))]:
                del self._tickets[old]
                self._kinds.drop(old)
        self._tickets[ticket] = _Admission(mesh, peer, link, now + self._kinds.ticket_s)

    async def serve(self, _: Any, context: Any) -> None:
        """Serves one call of Frames, from its ticket to its end."""
        ticket = dict(context.invocation_metadata()).get("paceline-ticket-bin", b"")
        admission, half = self._tickets.pop(ticket, None), self._kinds.take(ticket)
        if admission is None or half is None or admission.expires < time.monotonic() or self._closing.is_set():
            if half is not None:
                half.close()
            if self._closing.is_set():
                text = "this worker is leaving"
                await refuse(context, grpc.StatusCode.UNAVAILABLE, ErrorReason.ERROR_REASON_DRAINING, text)
            text = "Frames needs a fresh ticket from Hello, and a link that this ticket was issued for"
            await refuse(context, grpc.StatusCode.UNAUTHENTICATED, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        mesh, peer, link = admission.mesh, admission.peer, admission.link
        if not link.claim():  # two streams would mix up the order of frames, and a second half would hide the first
            half.close()
            _accuse(mesh.fault, peer, f"{peer} broke the protocol: it opened a link twice")
            text = "a link can have only one stream"
            await refuse(context, grpc.StatusCode.ALREADY_EXISTS, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        link.receive_by(half)
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        caller = context.peer()
        self._callers.came(caller)
        frames, sent, whole = 0, 0, False
        try:
            await context.write(peer_pb2.FramesResponse(accepted=peer_pb2.Accepted()))
            while (data := await context.read()) is not EOF:
                frame = decode(data)
                if frame.generation != mesh.generation:
                    text = f"a frame of generation {frame.generation} came to generation {mesh.generation}"
                    _accuse(mesh.fault, peer, f"{peer} broke the protocol: {text}")
                    reason = ErrorReason.ERROR_REASON_STALE_GENERATION
                    await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, reason, text)
                if whole and frame.kind is not FrameKind.ABORT:  # the peer's generation may fail while it leaves
                    text = f"a frame of kind {frame.kind.name} came after the last frame"
                    _accuse(mesh.fault, peer, f"{peer} broke the protocol: {text}")
                    reason = ErrorReason.ERROR_REASON_BAD_REQUEST
                    await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, reason, text)
                frames += 1
                if frame.kind in (FrameKind.CLOSE, FrameKind.LEAVE):
                    whole, sent = True, frame.operation
                    if frame.kind is FrameKind.LEAVE:
                        mesh.peer_leaves(peer.rank)
                elif frame.kind is FrameKind.ABORT:
                    _relay(mesh, peer, frame)
                elif isinstance(half, GrpcIncoming):
                    await half.put(frame)
                else:
                    text = f"a frame of an operation came by gRPC on a link of kind {half.kind}"
                    _accuse(mesh.fault, peer, f"{peer} broke the protocol: {text}")
                    reason = ErrorReason.ERROR_REASON_BAD_REQUEST
                    await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, reason, text)
            if not whole:
                mesh.peer_ended(peer.rank, LinkEnded(f"the link from {peer} ended"))
                return
            link.end_in(LinkEnded(f"{peer} left", orderly=True), sent)
            # This comes last: a peer that reads it may hang up at once, which cancels this call.
            await context.write(peer_pb2.FramesResponse(drained=peer_pb2.Drained(frames=frames)))
        except asyncio.CancelledError:
            if whole:
                raise
            if not self._closing.is_set():  # the connection broke under the stream
                mesh.peer_ended(peer.rank, LinkEnded(f"the link from {peer} ended"))
                raise
            await context.write(peer_pb2.FramesResponse(drained=peer_pb2.Drained(frames=frames)))
        except FrameDamaged as error:
            text = f"bytes from {peer} have changed on the way: {error}"
            _log.warning("%s; the link is closed", text)
            mesh.peer_ended(peer.rank, LinkEnded(text))
            await refuse(context, grpc.StatusCode.DATA_LOSS, ErrorReason.ERROR_REASON_PEER_LOST, text)
        except FrameError as error:
            _accuse(mesh.fault, peer, f"{peer} broke the protocol: it sent something that is not a frame: {error}")
            text = f"not a frame: {error}"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        except Exception as error:
            if is_exhausted(error):
                mesh.fault.broke(error)
            raise
        finally:
            self._streams.discard(task)
            self._callers.went(caller, time.monotonic())


def _relay(mesh: GrpcMesh, peer: Peer, frame: Frame) -> None:
    """Adopts a peer's suspicion if it makes sense."""
    try:
        if len(frame.payload) > MAX_WORD_BYTES:  # it would have room for millions of ranks
            raise ValueError(f"an abort of {len(frame.payload)} bytes")
        word = Verdict.FromString(bytes(frame.payload))
    except (DecodeError, ValueError):
        _accuse(mesh.fault, peer, f"{peer} broke the protocol: it sent an abort that cannot be read")
        return
    accused = word.culprits[0] if word.culprits else peer.rank
    if accused >= mesh.size or word.generation != mesh.generation:
        _accuse(mesh.fault, peer, f"{peer} broke the protocol: it sent an abort that makes no sense")
        return
    text = word.text[:MAX_TEXT]
    mesh.fault.suspect(Suspicion(word.reason, accused, word.operation, text, relayed=True))


def _accuse(fault: Fault, peer: Peer, text: str) -> None:
    fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL, peer.rank, 0, text))
