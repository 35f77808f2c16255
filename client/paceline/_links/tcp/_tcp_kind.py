"""TCP as a kind of link (`_links.kind`): each half has one to sixteen connections of its own.

The reader's worker listens at a second port at its door's address. A connection belongs to no half until it has shown a
ticket that the door gave out. A half starts when all of its streams have come. Only then does the reader answer all of
them, so that either both sides start or neither.

With TLS, data sockets use the same certificates as doors, so only members can connect. They use TLS 1.3 only: it has no
renegotiation, so a socket that only one side writes needs no answer from the other. They use no session tickets either:
a client that closes a socket with an unread ticket resets it, and bytes in transit would be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from paceline._base.addresses import look_up, parse_endpoint
from paceline._base.tls import make_context
from paceline._links.fault import Fault
from paceline._links.frame import FrameError
from paceline._links.kind import TICKET_BYTES, TICKET_LIFETIME, Incoming, Kind, LinkContext, Outgoing
from paceline._links.tcp._tcp_incoming import TcpIncoming
from paceline._links.tcp._tcp_outgoing import TcpOutgoing
from paceline._links.tcp._tcp_sockets import make_stream, retry, tune
from paceline._links.tcp._tcp_wire import ACCEPTED, HELLO_BYTES, Hello, decode_hello, encode_hello
from paceline.config import MAX_STREAMS, Config
from paceline.credentials import MEMBER_NAME, Credentials
from paceline.errors import LinkUnavailable
from pacelinepb.v1 import peer_pb2

_log = logging.getLogger("paceline.links")

_BACKLOG = 1024
"""Connections that can wait in the kernel: a large cluster's come all at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpLimits:
    """Limits of a `TcpHost` for connections that belong to no half yet."""

    max_strangers: int = 256
    """Most connections that have not shown a ticket yet; others wait in the kernel."""

    ticket_s: float = TICKET_LIFETIME
    """Seconds for all streams of a ticket to come."""

    hello_s: float = 1.0
    """Seconds for a connection to show its ticket, `ticket_s` at most: a member that dials gives up after the same time
    (`registry.OPEN_SECONDS`)."""

    hurried_s: float = 0.25
    """The same for the oldest of `max_strangers` while another connection waits; a TLS handshake takes two round trips.
    A peer that queues behind 700 strangers is accepted within a second."""

    recovery_s: float = 1.0
    """Seconds to wait when the process has no descriptors left."""


class TcpKind(Kind):
    """See `Kind`. `host` accepts the peers' data sockets; None while this worker does not listen."""

    name = "tcp"
    number = peer_pb2.LINK_KIND_TCP
    preference = 20

    def __init__(self, config: Config, credentials: Credentials) -> None:
        self.host: TcpHost | None = None
        self._streams = config.tcp_streams
        self._credentials = credentials

    async def start(self, host: str) -> None:
        """See `Kind.start`."""
        self.close()
        listening = TcpHost(asyncio.get_running_loop(), server_context(self._credentials))
        try:
            await listening.start(host)
        except LinkUnavailable as error:
            _log.warning("peers reach this worker by gRPC only: %s", error)
        else:
            self.host = listening

    def offer(self, context: LinkContext, hello: peer_pb2.HelloRequest) -> bool:
        """See `Kind.offer`. The peer's door knows whether the peer listens."""
        hello.tcp_streams = self._streams
        return True

    def expect(
        self,
        hello: peer_pb2.HelloRequest,
        context: LinkContext,
        ticket: bytes,
        on_open: Callable[[Incoming], None],
    ) -> peer_pb2.HelloResponse | None:
        """See `Kind.expect`."""
        streams = hello.tcp_streams or 1
        if self.host is None or streams > MAX_STREAMS:
            return None
        self.host.expect(ticket, streams, on_open, context.fault, str(context.peer))
        return peer_pb2.HelloResponse(tcp_port=self.host.port)

    async def open(
        self, answer: peer_pb2.HelloResponse, context: LinkContext, stream: object, timeout: float
    ) -> Outgoing:
        """See `Kind.open`."""
        peer = context.peer
        if answer.tcp_port > 0xFFFF:  # a socket would take it modulo 65,536
            raise LinkUnavailable(f"{peer} sent an invalid answer when a link was opened")
        try:
            async with asyncio.timeout(timeout):
                (_, target), *_ = await look_up(parse_endpoint(peer.address).host)
        except OSError as error:  # TimeoutError is a subclass
            raise LinkUnavailable(f"cannot find the host of {peer}: {error}") from None
        tls = client_context(self._credentials)
        return await connect(
            str(target[0]),
            answer.tcp_port,
            answer.ticket,
            self._streams,
            context.fault,
            str(peer),
            loop=asyncio.get_running_loop(),
            timeout=timeout,
            context=tls,
            server_name=MEMBER_NAME if tls is not None else None,
        )

    def close(self) -> None:
        """See `Kind.close`."""
        host, self.host = self.host, None
        if host is not None:
            host.close()


@dataclass(slots=True)
class _Expected:
    streams: int
    on_half: Callable[[TcpIncoming], None]
    fault: Fault
    peer: str
    expiry: asyncio.TimerHandle
    come: dict[int, socket.socket] = field(default_factory=dict)


class TcpHost:
    """Listens for data sockets. Everything runs on the loop.

    `context` comes from `server_context`, None without TLS. `port` is 0 while this does not listen. `limits` may be
    replaced: the new ones apply to connections that come later.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: ssl.SSLContext | None, *, limits: TcpLimits = TcpLimits()
    ) -> None:
        self.port = 0
        self.limits = limits
        self._loop = loop
        self._context = context
        self._listening: socket.socket | None = None
        self._is_accepting = False
        self._expected: dict[bytes, _Expected] = {}
        self._strangers: dict[asyncio.Task[None], float] = {}  # arrival times, the oldest first
        self._recovery: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int = 0) -> int:
        """Starts to listen at an interface, "" for all, and a port, 0 for any; returns it or raises LinkUnavailable."""
        try:
            both = socket.has_dualstack_ipv6()
            family, address = await _resolve(self._loop, host or ("::" if both else "0.0.0.0"), port)  # noqa: S104
            dual = both and address[0] == "::"
            listening = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        except OSError as error:
            raise LinkUnavailable(f"cannot listen for data on {host}:{port}: {error.strerror or error}") from None
        listening.setblocking(False)
        self._listening = listening
        self.port = int(listening.getsockname()[1])
        try:
            self._go_on()
        except NotImplementedError:  # Windows' loop
            self.close()
            raise LinkUnavailable("this kind of loop cannot watch sockets") from None
        return self.port

    def expect(
        self, ticket: bytes, streams: int, on_half: Callable[[TcpIncoming], None], fault: Fault, peer: str
    ) -> None:
        """Admits `streams` connections with this ticket, once, within `limits.ticket_s` seconds.

        `on_half` takes over the half when all have come. Then the peer starts to send.
        """
        if len(ticket) != TICKET_BYTES or not 1 <= streams <= MAX_STREAMS or ticket in self._expected:
            raise ValueError(f"a ticket of {len(ticket)} bytes for {streams} streams, or a ticket for the second time")
        expiry = self._loop.call_later(self.limits.ticket_s, self.forget, ticket)
        self._expected[ticket] = _Expected(streams, on_half, fault, peer, expiry)

    def forget(self, ticket: bytes) -> None:
        """Refuses this ticket from now on, and drops the streams that have come with it."""
        expected = self._expected.pop(ticket, None)
        if expected is not None:
            expected.expiry.cancel()
            for sock in expected.come.values():
                sock.close()

    def close(self) -> None:
        """Stops listening, and drops all connections that belong to no half yet. Idempotent."""
        self._pause()
        if self._recovery is not None:
            self._recovery.cancel()
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        for task in self._strangers:
            task.cancel()
        for ticket in list(self._expected):
            self.forget(ticket)

    def _go_on(self) -> None:
        if self._listening is not None and not self._is_accepting:
            self._loop.add_reader(self._listening, self._accept)
            self._is_accepting = True

    def _pause(self) -> None:
        if self._is_accepting:
            assert self._listening is not None
            self._loop.remove_reader(self._listening)
            self._is_accepting = False

    def _accept(self) -> None:
        assert self._listening is not None
        if len(self._strangers) >= self.limits.max_strangers:
            oldest = next(iter(self._strangers))
            left = self._strangers[oldest] + self.limits.hurried_s - self._loop.time()
            if left > 0:
                self._go_on_in(left)
                return
            oldest.cancel()
            del self._strangers[oldest]
        try:
            sock, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # the caller has gone
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            _log.warning("cannot accept data connections: %s", error.strerror)
            self._go_on_in(self.limits.recovery_s)
            return
        task = self._loop.create_task(self._welcome(sock))
        self._strangers[task] = self._loop.time()
        task.add_done_callback(partial(self._left, sock))

    def _go_on_in(self, seconds: float) -> None:
        """Accepts no connection for `seconds`, or until a stranger leaves."""
        self._pause()
        self._recovery = self._loop.call_later(seconds, self._go_on)

    def _left(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # perhaps before it started
            sock.close()
        self._strangers.pop(task, None)
        self._go_on()

    async def _welcome(self, sock: socket.socket) -> None:
        """Serves a connection until it shows a ticket or fails to show one."""
        with contextlib.ExitStack() as held:
            held.callback(lambda: sock.close())
            try:
                async with asyncio.timeout(min(self.limits.ticket_s, self.limits.hello_s)):
                    tune(sock)
                    if self._context is not None:
                        secure = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                        sock = secure
                        await retry(self._loop, secure, secure.do_handshake)
                    hello = await self._read_hello(sock)
            except (OSError, FrameError, TimeoutError) as error:  # an ssl.SSLError is an OSError
                _log.debug("refused an unknown caller at the data port: %s", error)
                return
            expected = self._expected.get(hello.ticket)
            if expected is None or expected.streams != hello.streams or hello.index in expected.come:
                _log.debug("refused a caller without a valid ticket at the data port")
                return
            held.pop_all()
            expected.come[hello.index] = sock
            if len(expected.come) == expected.streams:
                self._begin(hello.ticket, expected)

    async def _read_hello(self, sock: socket.socket) -> Hello:
        data = b""
        while len(data) < HELLO_BYTES:
            more = await retry(self._loop, sock, lambda: sock.recv(HELLO_BYTES - len(data)))  # noqa: B023  called here
            if not more:
                raise FrameError("the connection ended before its hello")
            data += more
        return decode_hello(data)

    def _begin(self, ticket: bytes, expected: _Expected) -> None:
        """Starts the half, because all its streams have come."""
        expected.expiry.cancel()
        del self._expected[ticket]
        streams = [make_stream(expected.come[index]) for index in range(expected.streams)]
        try:
            half = TcpIncoming(streams, self._loop, expected.fault, expected.peer)
        except OSError as error:  # no descriptor is left
            _log.warning("cannot use a data connection: %s", error.strerror)
            for stream in streams:
                stream.close()
            return
        try:
            expected.on_half(half)
        except BaseException:
            half.close()
            raise
        for stream in streams:
            with contextlib.suppress(OSError):  # it is broken, which the other side will report
                stream.sock.send(ACCEPTED)  # a new connection has room for one byte


async def _resolve(
    loop: asyncio.AbstractEventLoop, host: str, port: int
) -> tuple[socket.AddressFamily, tuple[str, int]]:
    flags = socket.AI_PASSIVE
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    family, *_, address = found[0]
    return family, (str(address[0]), int(address[1]))


async def connect(
    host: str,
    port: int,
    ticket: bytes,
    streams: int,
    fault: Fault,
    peer: str,
    *,
    loop: asyncio.AbstractEventLoop,
    timeout: float,
    context: ssl.SSLContext | None = None,
    server_name: str | None = None,
) -> TcpOutgoing:
    """Connects all streams of a half to a `TcpHost`, within `timeout` seconds in all.

    The peer expects the ticket and 1 to MAX_STREAMS connections. With TLS, `context` comes from `client_context`, and
    the peer's certificate must contain `server_name`. Raises LinkUnavailable if the half cannot be opened; the link
    then uses another kind.
    """
    if not 1 <= streams <= MAX_STREAMS or (context is not None and not server_name):
        raise ValueError(f"{streams} streams, with TLS for the name {server_name!r}")
    with contextlib.ExitStack() as made:
        hellos = [encode_hello(Hello(ticket, index, streams)) for index in range(streams)]
        tasks = [loop.create_task(_dial(made, loop, host, port, hello, context, server_name)) for hello in hellos]
        try:
            async with asyncio.timeout(timeout):
                socks = await asyncio.gather(*tasks)
        except (OSError, TimeoutError) as error:  # an ssl.SSLError is an OSError
            why = _why(error, timeout)
            raise LinkUnavailable(f"no data connection to {peer} at {host}:{port}: {why}") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        streams_made = [make_stream(sock) for sock in socks]
        try:
            half = TcpOutgoing(streams_made, fault, peer)
        except OSError as error:  # no descriptor is left
            for stream in streams_made:
                stream.close()
            raise LinkUnavailable(f"no data connection to {peer} at {host}:{port}: {error.strerror}") from error
        made.pop_all()
    return half


def _why(error: BaseException, timeout: float) -> str:
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError | socket.gaierror):
        return os.strerror(error.errno)  # asyncio's own text says only that the call failed
    return str(error) or f"no answer in {timeout:g} s"


async def _dial(
    made: contextlib.ExitStack,
    loop: asyncio.AbstractEventLoop,
    host: str,
    port: int,
    hello: bytes,
    context: ssl.SSLContext | None,
    server_name: str | None,
) -> socket.socket:
    """Returns one accepted connection, which `made` closes if the half does not come about."""
    sock = await _reach(loop, host, port)
    made.callback(lambda: sock.close())
    if context is not None:
        secure = context.wrap_socket(sock, server_hostname=server_name, do_handshake_on_connect=False)
        sock = secure
        await retry(loop, secure, secure.do_handshake)
    sent = await retry(loop, sock, lambda: sock.send(hello))
    assert sent == len(hello), "a new connection has room for a hello"
    answer = await retry(loop, sock, lambda: sock.recv(len(ACCEPTED)))
    if answer != ACCEPTED:
        raise ConnectionError("it was not accepted" if not answer else "the answer is not one of Paceline")
    return sock


async def _reach(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
    """Connects to the first of the host's addresses that accepts."""
    failure: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        tune(sock)
        try:
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure or OSError(f"{host} has no address")


def server_context(credentials: Credentials) -> ssl.SSLContext | None:
    """Returns `TcpHost`'s context, which asks callers for a certificate of the same authority; None without TLS.

    Raises ValueError if a worker's credentials lack a certificate, or it cannot be used.
    """
    files = credentials.files
    if files is None:
        return None
    if files.cert is None:
        raise ValueError("with TLS a worker needs a certificate: without one its data sockets would not be encrypted")
    context = make_context(files, serving=True)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    return context


def client_context(credentials: Credentials) -> ssl.SSLContext | None:
    """Returns the context for `connect`, to be used with MEMBER_NAME as `server_name`; None without TLS.

    Raises ValueError if a certificate cannot be used.
    """
    files = credentials.files
    if files is None:
        return None
    context = make_context(files)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
