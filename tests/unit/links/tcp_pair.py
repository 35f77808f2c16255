"""Tcp halves over real loopback sockets: one direction, or two ends of a link that is nothing but its halves."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from unit.links.halves_link import HalvesLink

from paceline._base.waits import loop_thread
from paceline._links.base import Peer
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline._links.tcp import (
    TICKET_BYTES,
    TcpHost,
    TcpIncoming,
    TcpLimits,
    TcpOutgoing,
    client_context,
    connect,
    server_context,
)
from paceline._links.tcp._tcp_wire import ACCEPTED, Hello, encode_hello
from paceline.credentials import IN_THE_CLEAR, MEMBER_NAME, Credentials
from paceline.testing import LinkPair

__all__ = [
    "OneWay",
    "RawWriter",
    "call_at",
    "data",
    "listening",
    "on_loop",
    "one_way",
    "open_half",
    "raw_writer",
    "tcp_link_pair",
]


def open_half(
    host: TcpHost,
    port: int,
    streams: int,
    faults: tuple[Fault, Fault],
    *,
    context: ssl.SSLContext | None = None,
) -> tuple[TcpOutgoing, TcpIncoming]:
    """A half's two ends: what the writer got, and what the reader got.

    Args:
        host: listens on 127.0.0.1.
        port: of the host.
        streams: of the half.
        faults: the writer's and the reader's.
        context: the writer's TLS.
    """

    async def meet() -> tuple[TcpOutgoing, TcpIncoming]:
        loop = asyncio.get_running_loop()
        come: list[TcpIncoming] = []
        ticket = secrets.token_bytes(TICKET_BYTES)
        host.expect(ticket, streams, come.append, faults[1], "the writer")
        out = await connect(
            "127.0.0.1",
            port,
            ticket,
            streams,
            faults[0],
            "the reader",
            loop=loop,
            timeout=10.0,
            context=context,
            server_name=MEMBER_NAME,
        )
        return out, come[0]

    return loop_thread().run(meet())


@contextmanager
def listening(credentials: Credentials = IN_THE_CLEAR, limits: TcpLimits | None = None) -> Iterator[TcpHost]:
    """A host on 127.0.0.1 for the block."""
    thread = loop_thread()
    host = TcpHost(thread.loop, server_context(credentials), limits=limits or TcpLimits())
    thread.run(host.start("127.0.0.1"))
    try:
        yield host
    finally:
        on_loop(host.close)


@dataclass
class OneWay:
    """One direction.

    Attributes:
        out: the writer's end.
        into: the reader's.
        fault_out: the fault that the writer obeys.
        fault_in: the fault that the reader obeys.
    """

    out: TcpOutgoing
    into: TcpIncoming
    fault_out: Fault
    fault_in: Fault


@contextmanager
def one_way(streams: int = 1, credentials: Credentials = IN_THE_CLEAR, *, generation: int = 1) -> Iterator[OneWay]:
    """One direction for the block; a failure of either fault wakes its half, as a link has it done."""
    faults = Fault(generation, 0, 0.0), Fault(generation, 1, 0.0)
    with listening(credentials) as host:
        context = client_context(credentials)
        out, into = open_half(host, host.port, streams, faults, context=context)
        faults[0].on_failure(out.wake)
        faults[1].on_failure(into.wake)
        try:
            yield OneWay(out, into, *faults)
        finally:
            out.close()
            into.close()


@contextmanager
def tcp_link_pair(streams: int = 1, credentials: Credentials = IN_THE_CLEAR) -> Iterator[LinkPair]:
    """Two ends of one link, for `paceline.testing.check_link`."""
    faults = Fault(1, 0, 0.0), Fault(1, 1, 0.0)
    context = client_context(credentials)
    with listening(credentials) as host:
        there = open_half(host, host.port, streams, faults, context=context)
        back = open_half(host, host.port, streams, (faults[1], faults[0]), context=context)
        a = HalvesLink("tcp", Peer(1, "b", "host-b"), there[0], back[1], faults[0])
        b = HalvesLink("tcp", Peer(0, "a", "host-a"), back[0], there[1], faults[1])
        a.other, b.other = b, a
        try:
            yield LinkPair(a, b, *faults, b.cut)
        finally:
            for half in (*there, *back):
                half.close()


def data(payload: bytes | memoryview, part: int = 0, signature: bytes = b"", *, generation: int = 1) -> Frame:
    """A frame of data."""
    return Frame(FrameKind.DATA, generation, 1, part, signature, payload)


@dataclass
class RawWriter:
    """A writer that is bare sockets, for bytes that no half would send.

    Attributes:
        socks: the streams, blocking.
        into: the reader's end.
        fault: of the reader.
    """

    socks: list[socket.socket]
    into: TcpIncoming
    fault: Fault


@contextmanager
def raw_writer(streams: int = 1) -> Iterator[RawWriter]:
    """Bare sockets that were taken for the streams of a half."""
    fault = Fault(1, 1, 0.0)
    with listening() as host, ExitStack() as held:
        come: list[TcpIncoming] = []
        ticket = secrets.token_bytes(TICKET_BYTES)
        on_loop(host.expect, ticket, streams, come.append, fault, "the writer")
        socks = [held.enter_context(call_at(host, Hello(ticket, index, streams))) for index in range(streams)]
        for sock in socks:
            assert sock.recv(1) == ACCEPTED
        held.callback(come[0].close)
        fault.on_failure(come[0].wake)
        yield RawWriter(socks, come[0], fault)


def call_at(host: TcpHost, hello: Hello | bytes = b"") -> socket.socket:
    """A bare connection to a host, which has said these words."""
    sock = socket.create_connection(("127.0.0.1", host.port), timeout=10.0)
    sock.sendall(hello if isinstance(hello, bytes) else encode_hello(hello))
    return sock


def on_loop(call: Callable[..., object], *arguments: object) -> None:
    """Calls it on the loop, and waits until it is done."""

    async def run() -> None:
        call(*arguments)

    loop_thread().run(run())
