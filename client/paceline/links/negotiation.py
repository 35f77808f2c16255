"""How frames travel from one member to another: what the caller offers, what the door chooses, and what is opened.

The caller offers the kinds of halves that it can write, the best first, in its Hello; the door chooses the first that
it can read, and expects it under the ticket that it gives. What cannot be opened after all is offered no more in this
generation: the kinds below it take its place, and gRPC is always the last. Nothing is guessed from the names of hosts:
that two members share memory is said by the view (`Peer.node`), and shown by the kernel when it is handed over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.config import MAX_STREAMS, Config
from paceline.credentials import MEMBER_NAME, Credentials
from paceline.errors import LinkUnavailable
from paceline.links.base import Peer
from paceline.links.fault import Fault
from paceline.links.halves import Incoming, Outgoing
from paceline.links.shm import handover
from paceline.links.shm.arena import arena
from paceline.links.tcp import dial as tcp_dial
from paceline.links.tcp.listener import TcpHost
from paceline.links.tcp.tls import client_context, server_context
from paceline.links.tcp.wire import TICKET_BYTES
from paceline.session.address import parse_endpoint
from paceline.session.lookup import look_up
from pacelinepb.v1 import peer_pb2

__all__ = ["TICKET_LIFETIME", "Kind", "WayOut", "Ways"]

_log = logging.getLogger("paceline.links")

TICKET_LIFETIME = 10.0
"""Seconds for which a ticket is good (peer.proto)."""

OPEN_SECONDS = 1.0
"""For a half to be opened: an answer takes milliseconds, and where a firewall drops what is sent, gRPC is waiting."""

_GRPC, _TCP, _SHM = peer_pb2.LINK_KIND_GRPC, peer_pb2.LINK_KIND_TCP, peer_pb2.LINK_KIND_SHM

Kind: TypeAlias = peer_pb2.LinkKind.ValueType


class Ways:
    """The halves that one worker has. On the loop.

    Args:
        config: which kinds may be used.
        credentials: by what members know each other; shared memory needs none, for the kernel says who is there.
    """

    def __init__(self, config: Config, credentials: Credentials) -> None:
        self._config = config
        self._credentials = credentials
        self._shm: handover.ShmHost | None = None
        self._tcp: TcpHost | None = None
        self._come: dict[bytes, Incoming] = {}  # halves whose stream has yet to come, by ticket

    async def start(self, host: str) -> None:
        """Listens beside the door, at the same address; called again when that changes."""
        loop = asyncio.get_running_loop()
        if "shm" in self._config.links and self._shm is None:
            try:
                self._shm = handover.ShmHost(loop)
            except LinkUnavailable as error:
                _log.info(
                    "no shared memory for links to members of this host, which use another kind of link: %s", error
                )
        if "tcp" in self._config.links:
            former, self._tcp = self._tcp, None
            if former is not None:
                former.close()
            tcp = TcpHost(loop, server_context(self._credentials), patience=TICKET_LIFETIME)
            try:
                await tcp.start(host)
            except LinkUnavailable as error:
                _log.warning("peers reach this worker by gRPC only: %s", error)
            else:
                self._tcp = tcp

    def close(self) -> None:
        """Listens no more."""
        for host in (self._shm, self._tcp):
            if host is not None:
                host.close()
        for half in self._come.values():
            half.close()
        self._come.clear()

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array that links can lend without a copy. From any thread."""
        return np.empty(shape, dtype) if self._shm is None else arena().empty(shape, dtype)

    def way_out(self, node: str, fault: Fault, neighbours: int) -> WayOut:
        """Opens halves for the links of one generation; `node` is this member's, `neighbours` how many share it."""
        return WayOut(self._config, self._credentials, node if self._shm is not None else "", fault, neighbours)

    def expect(
        self, hello: peer_pb2.HelloRequest, caller: Peer, node: str, fault: Fault, ticket: bytes, neighbours: int
    ) -> peer_pb2.HelloResponse | None:
        """Chooses a kind for a caller, and expects its half; None if it offers none that this worker has."""
        came = partial(self._half_came, ticket)
        streams = hello.tcp_streams or 1
        for kind in hello.offered:
            if kind == _SHM and self._shm is not None and node and node == caller.node:
                self._shm.expect(ticket, came, fault, caller, neighbours)
                return peer_pb2.HelloResponse(chosen=kind, ticket=ticket, shm_name=self._shm.name)
            if kind == _TCP and self._tcp is not None and streams <= MAX_STREAMS:
                self._tcp.expect(ticket, streams, came, fault, str(caller))
                return peer_pb2.HelloResponse(chosen=kind, ticket=ticket, tcp_port=self._tcp.port)
            if kind == _GRPC:
                return peer_pb2.HelloResponse(chosen=kind, ticket=ticket)
        return None

    def take(self, ticket: bytes) -> Incoming | None:
        """The half that has come with a ticket; the taker's from now on."""
        return self._come.pop(ticket, None)

    def _half_came(self, ticket: bytes, half: Incoming) -> None:
        self._come[ticket] = half
        asyncio.get_running_loop().call_later(TICKET_LIFETIME, self._drop, ticket)

    def _drop(self, ticket: bytes) -> None:
        """The stream that belongs to it has not come."""
        half = self._come.pop(ticket, None)
        if half is not None:
            half.close()


class WayOut:
    """Opens the halves that this member writes, in one generation. On the loop.

    Args:
        config: which kinds may be used.
        credentials: by what members know each other.
        node: this member's; empty if it shares no memory.
        fault: how the generation ends.
        neighbours: other members on it.
    """

    def __init__(self, config: Config, credentials: Credentials, node: str, fault: Fault, neighbours: int) -> None:
        self._config = config
        self._credentials = credentials
        self._node = node
        self._fault = fault
        self._neighbours = neighbours
        self._given_up: set[tuple[int, Kind]] = set()

    @property
    def streams(self) -> int:
        """TCP connections of one half."""
        return self._config.tcp_streams

    def offers(self, peer: Peer) -> Sequence[Kind]:
        """Kinds to offer to a peer's door, the best first."""
        kinds: list[Kind] = [_GRPC]
        if "tcp" in self._config.links:
            kinds.insert(0, _TCP)
        if self._node and self._node == peer.node:
            kinds.insert(0, _SHM)
        return [kind for kind in kinds if (peer.rank, kind) not in self._given_up]

    def give_up(self, peer: Peer, kind: Kind) -> None:
        """That kind could not be opened to that peer: it is not offered again."""
        self._given_up.add((peer.rank, kind))

    async def open(self, answer: peer_pb2.HelloResponse, peer: Peer) -> Outgoing:
        """Opens what the door has chosen.

        Raises:
            LinkUnavailable: it cannot be opened.
        """
        loop = asyncio.get_running_loop()
        if len(answer.ticket) != TICKET_BYTES or answer.tcp_port > 0xFFFF:  # who writes them would cut them to size
            raise LinkUnavailable(f"{peer} sent an invalid answer when a link was opened")
        if answer.chosen == _SHM:
            return await handover.connect(
                answer.shm_name, answer.ticket, self._fault, peer, loop, OPEN_SECONDS, self._neighbours
            )
        if answer.chosen != _TCP:
            raise LinkUnavailable(f"{peer} chose a kind of link that was not offered")
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                (_, target), *_ = await look_up(parse_endpoint(peer.address).host)
        except OSError as error:  # TimeoutError is one
            raise LinkUnavailable(f"the host of {peer} is not found: {error}") from None
        context = client_context(self._credentials)
        return await tcp_dial.connect(
            str(target[0]),
            answer.tcp_port,
            answer.ticket,
            self.streams,
            self._fault,
            str(peer),
            loop=loop,
            timeout=OPEN_SECONDS,
            context=context,
            server_name=MEMBER_NAME if context is not None else None,
        )
