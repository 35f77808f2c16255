"""The kinds of links, and how two members agree on one.

To add a kind: write a `Kind` (`kind.py` is its contract, `paceline.testing.check_link` checks it), register it here,
give it a number in peer.proto, with the fields that its `HelloResponse` needs, and name it in `config.LINKS` if it is
used by default. `tests/support/worlds.py` lists the kinds that tests run over.

The side that writes offers in its Hello the kinds that it can write to this peer, the best first. The peer's door
chooses the first that it can read, and expects a half of that kind under the ticket that it gives out. If a kind cannot
be opened after all, the writer does not offer it to that peer again in this generation. It tries the next one; gRPC is
always the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline._links.base import Peer
from paceline._links.fault import Fault
from paceline._links.grpc_kind import GrpcKind
from paceline._links.kind import TICKET_BYTES, TICKET_LIFETIME, Incoming, Kind, LinkContext, Outgoing
from paceline._links.outbox import Outbox
from paceline._links.shm.shm_kind import ShmKind
from paceline._links.tcp import TcpKind
from paceline.config import Config, know_link
from paceline.credentials import Credentials
from paceline.errors import LinkUnavailable
from pacelinepb.v1 import peer_pb2

OPEN_SECONDS = 1.0
"""Seconds to open a half. An answer takes milliseconds; if a firewall drops the packets, gRPC is used instead."""

K = TypeVar("K", bound=Kind)

_kinds: dict[str, type[Kind]] = {}


def register(kind: type[Kind]) -> None:
    """Registers a kind under its name in `Config.links`; raises ValueError if another has its name or number."""
    for other in _kinds.values():
        if kind.name == other.name or kind.number == other.number:
            raise ValueError(f"the kind {kind.name!r} (number {kind.number}) is taken by {other.__name__}")
    _kinds[kind.name] = kind
    know_link(kind.name)


def unregister(kind: type[Kind]) -> None:
    """Undoes `register`. Workers that exist already keep the kind."""
    del _kinds[kind.name]
    know_link(kind.name, known=False)


register(ShmKind)
register(TcpKind)
register(GrpcKind)


class LinkKinds:
    """The kinds of links that one worker has, the best first. Used on the loop, except for `empty`.

    The settings say which kinds may be used; gRPC always may. A half has `open_s` seconds to open. One that has come
    waits `ticket_s` seconds for its stream.
    """

    def __init__(
        self,
        config: Config,
        credentials: Credentials,
        *,
        open_s: float = OPEN_SECONDS,
        ticket_s: float = TICKET_LIFETIME,
    ) -> None:
        self.open_s = open_s
        self.ticket_s = ticket_s
        allowed = [kind for name, kind in _kinds.items() if name in (*config.links, GrpcKind.name)]
        allowed.sort(key=lambda kind: -kind.preference)
        self._kinds = {kind.number: kind(config, credentials) for kind in allowed}
        self._come: dict[bytes, tuple[Incoming, asyncio.TimerHandle]] = {}  # halves whose stream has not come yet

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._kinds.values())

    def of(self, kind: type[K]) -> K:
        """Returns the kind of this class; raises LookupError if this worker has none."""
        for own in self:
            if isinstance(own, kind):
                return own
        raise LookupError(f"this worker has no {kind.__name__}")

    def by_number(self, number: int) -> Kind | None:
        """Returns the kind with this number on the wire; None if this worker has none."""
        return self._kinds.get(number)  # type: ignore[call-overload, no-any-return]  # a number from the wire is any int

    async def start(self, host: str) -> None:
        """Starts all kinds at the door's address. Called again when the address changes."""
        for kind in self:
            await kind.start(host)

    def close(self) -> None:
        """Stops listening."""
        for kind in self:
            kind.close()
        for ticket in list(self._come):
            self.drop(ticket)

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns a new array that links can lend without a copy, if any kind can do that. Thread-safe."""
        for kind in self:
            array = kind.empty(shape, dtype)
            if array is not None:
                return array
        return np.empty(shape, dtype)

    def openings(self, node: str, neighbours: int, fault: Fault) -> Openings:
        """Returns the object that opens the halves that this member writes in one generation."""
        return Openings(self, node, neighbours, fault)

    def expect(
        self, hello: peer_pb2.HelloRequest, context: LinkContext, ticket: bytes
    ) -> peer_pb2.HelloResponse | None:
        """Chooses a kind for a caller, and expects its half; None if the caller offers none that both can use."""
        for number in hello.offered:
            kind = self.by_number(number)
            answer = kind.expect(hello, context, ticket, partial(self._keep, ticket)) if kind is not None else None
            if answer is not None:
                answer.chosen, answer.ticket = number, ticket
                return answer
        return None

    def take(self, ticket: bytes) -> Incoming | None:
        """Hands over the half that has come with a ticket; None if none has come."""
        half, expiry = self._come.pop(ticket, (None, None))
        if expiry is not None:
            expiry.cancel()
        return half

    def drop(self, ticket: bytes) -> None:
        """Closes the half that has come with a ticket, if any, because no stream will follow."""
        half = self.take(ticket)
        if half is not None:
            half.close()

    def _keep(self, ticket: bytes, half: Incoming) -> None:
        self._come[ticket] = half, asyncio.get_running_loop().call_later(self.ticket_s, self.drop, ticket)


class Openings:
    """Opens the halves that one member writes in one generation. Used on the loop."""

    def __init__(self, kinds: LinkKinds, node: str, neighbours: int, fault: Fault) -> None:
        self._kinds = kinds
        self._node = node
        self._neighbours = neighbours
        self._fault = fault
        self._given_up: set[tuple[int, int]] = set()

    def offer(self, peer: Peer, hello: peer_pb2.HelloRequest) -> None:
        """Makes a request to a peer's door offer the kinds that this worker can write, the best first."""
        del hello.offered[:]
        for kind in self._kinds:
            if (peer.rank, kind.number) not in self._given_up and kind.offer(self._context(peer), hello):
                hello.offered.append(kind.number)

    def give_up(self, peer: Peer, number: int) -> None:
        """Stops offering a kind to a peer, because it could not be opened."""
        self._given_up.add((peer.rank, number))

    async def open(self, answer: peer_pb2.HelloResponse, peer: Peer, stream: Outbox) -> Outgoing:
        """Opens a half of the kind that the peer's door has chosen; raises LinkUnavailable if it cannot."""
        kind = self._kinds.by_number(answer.chosen)
        if kind is None:
            raise LinkUnavailable(f"{peer} chose a kind of link that was not offered")
        if len(answer.ticket) != TICKET_BYTES:
            raise LinkUnavailable(f"{peer} sent an invalid answer when a link was opened")
        return await kind.open(answer, self._context(peer), stream, self._kinds.open_s)

    def _context(self, peer: Peer) -> LinkContext:
        return LinkContext(peer, self._node, self._neighbours, self._fault)
