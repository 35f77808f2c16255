"""The front door of a worker: its PeerService, where members authenticate, negotiate and deliver frames.

Nothing of a stranger gets further than the door: a link needs a ticket, a ticket needs the ids of two members of the
generation, and every frame is checked before it is queued (I4, I9).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from paceline._grpc import aio, grpc
from paceline.config import Config
from paceline.credentials import Credentials
from paceline.errors import LinkUnavailable
from paceline.links.base import MAX_GROUP_NAME, Purpose
from paceline.links.frame import MAX_FRAME_BYTES
from paceline.links.grpc_intake import Household, Intake
from paceline.links.grpc_knock import Knocks
from paceline.links.grpc_methods import MAX_REQUEST_BYTES, Requests
from paceline.links.grpc_refusal import refuse, shown
from paceline.links.grpc_state import StateWindow
from paceline.links.negotiation import TICKET_LIFETIME, Ways
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.v1 import peer_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["Door"]

MAX_WAITING = 4096
"""Callers that wait for this worker to hear of its view."""

MAX_WAITING_EACH = 64
"""The same on one connection; one more is told at once, and knocks again."""

MAX_STREAMS = 1024
"""Calls of one connection at one time; more wait at the caller's. A member has one for each purpose of each group, and
those of the generation before for a moment."""

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + MAX_REQUEST_BYTES
"""Of any method: grpc has one limit for all. A frame that is too long is ours to refuse, by name of its sender; of one
that is longer than this grpc breaks the stream."""

IDLE_SECONDS = 5.0
"""For which a connection may be there without a call: else a thousand of a stranger's would take all files. No link is
ever idle, whatever carries its frames: the stream of its Frames stays open."""

PING_SECONDS, PONG_SECONDS = 60.0, 20.0
"""After how long without a word a connection with calls is asked whether its other end is there, and for how long an
answer is waited for, or `failure_timeout` if that is longer: streams of a host that has gone must not stay for ever."""

_SERVICE = "pacelinepb.v1.PeerService"

_DEFAULT = Config()


class Door:
    """The PeerService of one worker. Everything runs on the loop that started it.

    Args:
        job: the job whose members may knock.
        credentials: by what members know each other: with TLS nobody gets in without a certificate of theirs.
        config: which kinds of links may be used.

    Attributes:
        ways: the halves that this worker has.
        window: where state is handed out.
    """

    def __init__(self, job: str, credentials: Credentials, config: Config = _DEFAULT) -> None:
        self._job = job
        self._credentials = credentials
        self._pong_seconds = max(PONG_SECONDS, config.failure_timeout)
        self.ways = Ways(config, credentials)
        self.window = StateWindow(job)
        self._knocks = Knocks(job, lambda: self.window.member_id, credentials)
        self._servers: list[aio.Server] = []  # one, or for a moment two: the address is changed
        self._starting: asyncio.Future[None] | None = None
        self._inside: Household | None = None
        self._entered = asyncio.Event()
        self._intake = Intake(self.ways)
        self._closing = asyncio.Event()
        self._requests = Requests(credentials.door_key)
        self._waiting: Counter[str] = Counter()  # by connection

    def on_exhausted(self, hear: Callable[[BaseException], None]) -> None:
        """Has a function called if a call fails because this process has no memory, thread or descriptor left."""
        self._requests.on_exhausted = hear

    async def start(self, host: str, port: int) -> int:
        """Listens.

        Returns:
            The port, which is a free one if 0 was asked for.

        Raises:
            LinkUnavailable: the address cannot be bound.
        """
        bound = await self._open(host, port)
        await self.ways.start(host)
        return bound

    async def _open(self, host: str, port: int) -> int:
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", round(1000 * TICKET_LIFETIME)),
            ("grpc.max_connection_idle_ms", round(1000 * IDLE_SECONDS)),
            ("grpc.keepalive_time_ms", round(1000 * PING_SECONDS)),
            ("grpc.keepalive_timeout_ms", round(1000 * self._pong_seconds)),
            # What ends a connection without an answer: grpc does not heed keepalive_timeout_ms while a ping of its own,
            # which measures the network, is under way, and waits a minute for that one.
            ("grpc.http2.ping_timeout_ms", round(1000 * self._pong_seconds)),
            ("grpc.http2.max_pings_without_data", 0),  # no limit: a door that takes frames in has nothing to send
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
        """Listens at another address, and no more at the one before: what still went on there breaks off.

        Who is inside, tickets and the window stay as they are.

        Args:
            host: as for `start`.
            port: as for `start`.
            bound: called when the new address is this door's, before anything breaks off.

        Returns:
            The port, as `start` does.

        Raises:
            LinkUnavailable: the address cannot be bound; nothing has changed.
        """
        found = await self._open(host, port)
        bound()
        await self.ways.start(host)
        while len(self._servers) > 1:
            await self._servers[0].stop(None)
            del self._servers[0]
        return found

    def enter(self, inside: Household) -> None:
        """Opens the door for the members of a generation; earlier ones are turned away from now on."""
        self._inside = inside
        self._entered.set()

    async def close(self, grace: float = 0.2) -> None:
        """Ends every stream with the word that all of it was taken in, then stops listening."""
        self._closing.set()
        self._entered.set()
        self._intake.close()
        self.ways.close()
        if self._starting is not None:  # grpc crashes if a server is stopped before, or while, it starts
            await asyncio.wait([self._starting])
        await asyncio.gather(*(server.stop(grace) for server in self._servers))

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
        if int(request.purpose) not in Purpose.__members__.values():
            text = "no purpose that a link can have"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        inbox = None
        if len(request.group.encode()) <= MAX_GROUP_NAME:
            inbox = inside.inbox(peer.rank, Purpose(request.purpose), request.group)
        if inbox is None:
            text = "too many groups, or a name of one that is too long"
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorReason.ERROR_REASON_LIMIT, text)
        ticket = secrets.token_bytes(16)
        answer = self.ways.expect(request, peer, inside.node, inside.fault, ticket, inside.neighbours)
        if answer is None:
            text = "no kind of link that both sides have"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        self._intake.expect(ticket, inside, peer, inbox, answer.chosen)
        return answer

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


async def _not_this_member(request: peer_pb2.HelloRequest, context: Any) -> NoReturn:
    text = f"this is not member {shown(request.to_member)}"  # whose door it is, is no stranger's business
    await refuse(context, grpc.StatusCode.NOT_FOUND, ErrorReason.ERROR_REASON_NOT_FOUND, text)


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
