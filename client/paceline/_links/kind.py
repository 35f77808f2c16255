"""The contract of a kind of link: how frames go out to a peer, how they come in, and how the two sides find each other.

Every link has a gRPC stream in each direction. The stream authenticates, watches the peer, passes on aborts and says
how the link ends. Frames of operations go through halves: the sender writes an `Outgoing`, the receiver reads an
`Incoming`. The side that writes a direction negotiates its half, independently of the other direction. A `Kind` makes
the halves. Paceline comes with three kinds: shared memory, TCP and gRPC (the stream itself). `registry.py` lists them.

Halves keep all rules of `_links.base` except 5, which is about the end of a whole link. At any time one thread writes
an `Outgoing` and one thread reads an `Incoming`; any thread may call `wake`, `end` and `close`. `wake` ends every wait
once the generation has failed (I7).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline._links.base import LinkEnded, Peer
from paceline._links.fault import Fault
from paceline._links.frame import Frame
from paceline._links.outbox import Outbox
from paceline.config import Config
from paceline.credentials import Credentials
from pacelinepb.v1 import peer_pb2

TICKET_BYTES = 16
"""Length of a ticket, which is random and valid for one half (peer.proto)."""

TICKET_LIFETIME = 10.0
"""Seconds for which a ticket is valid (peer.proto)."""

KindNumber: TypeAlias = peer_pb2.LinkKind.ValueType
"""The number of a kind on the wire (peer.proto)."""


class ProtocolError(LinkEnded):
    """The peer sent bytes that are no frame: it broke the protocol, and the link has ended."""


class Outgoing(abc.ABC):
    """Frames to one peer.

    Attributes:
        kind: name of the kind, as in `Config.links`.
        frames: number of frames sent so far outside of the link's gRPC stream, which cannot count them itself.
        sent_bytes: bytes sent so far.
    """

    kind: str
    frames: int
    sent_bytes: int

    @abc.abstractmethod
    def send(self, frame: Frame, deadline: float) -> None:
        """Sends a frame. On return the caller may reuse the payload (`Link.send`).

        Raises:
            LinkTimeout: backpressure outlasted the deadline; the frame was not sent, and the half is unchanged.
            LinkEnded: the half has ended.
            PacelineError: the generation has failed.
        """

    @abc.abstractmethod
    def lend(self, frame: Frame, deadline: float) -> None:
        """Sends a frame whose payload may be read until `await_release` or `recall` has returned (`Link.lend`)."""

    def mark(self, number: int) -> bool:
        """See `Link.mark`."""
        return False

    @abc.abstractmethod
    def await_release(self, deadline: float) -> None:
        """Waits until the peer no longer reads lent payloads (`Link.await_release`)."""

    @abc.abstractmethod
    def recall(self) -> None:
        """Takes back lent payloads: on return this process does not read them, and the peer discards what it read.

        Call it only once the generation has failed or the half has ended. It waits only for threads of this process.
        """

    @abc.abstractmethod
    def flush(self, deadline: float) -> None:
        """Waits until the kernel or the peer has everything that was sent, so that it survives this process's end."""

    def stuck_for(self, now: float) -> float:
        """Returns for how many seconds the peer's host has acknowledged nothing, as far as earlier calls have observed.

        The host of a peer that computes, or is frozen, acknowledges bytes; the host of one that is cut off does not.
        """
        return 0.0

    @abc.abstractmethod
    def wake(self) -> None:
        """Makes blocked calls look at the fault."""

    @abc.abstractmethod
    def end(self, error: LinkEnded) -> None:
        """Makes blocked and later calls raise this error: the peer is gone."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees descriptors and memory. No other call follows. Idempotent."""


class Incoming(abc.ABC):
    """Frames from one peer.

    Attributes:
        kind: name of the kind, as in `Config.links`.
    """

    kind: str

    @abc.abstractmethod
    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        """Returns the next frame (`Link.recv`), whose payload may be read until `release`.

        Args:
            deadline: a `time.monotonic()` value.
            into: memory for a payload of exactly this length (bytes, contiguous, writable). If the half uses it, the
                frame's payload is this object, and needs no release. Its content is undefined if the call raises.

        Raises:
            LinkTimeout: no whole frame came before the deadline; nothing is consumed, and a later call continues.
            LinkEnded: the peer has closed or broken the link, and all frames that it sent have been read.
            PacelineError: the generation has failed.
        """

    def await_mark(self, deadline: float) -> Frame | int:
        """See `Link.await_mark`."""
        return self.recv(deadline)

    @abc.abstractmethod
    def release(self) -> None:
        """Releases the payloads received so far.

        Raises:
            LinkEnded: the peer took a payload back while it was being read: results computed from it are void.
        """

    @abc.abstractmethod
    def on_readable(self, notify: Callable[[], None]) -> None:
        """See `Link.on_readable`."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Makes a blocked call look at the fault."""

    @abc.abstractmethod
    def end(self, error: LinkEnded, frames: int | None = None) -> None:
        """Says that nothing follows after `frames` frames in all; None: after the frames that have arrived."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees descriptors and memory. No other call follows. Idempotent."""


@dataclass(frozen=True, slots=True)
class LinkContext:
    """The facts that a kind knows about a half's link.

    Attributes:
        peer: the member at the other end.
        node: this member's node, like `Peer.node`.
        neighbours: see `Mesh.neighbours`.
        fault: how the generation ends.
    """

    peer: Peer
    node: str
    neighbours: int
    fault: Fault


class Kind(abc.ABC):
    """One kind of link at one worker. Everything except `empty` runs on the loop.

    Args:
        config: the worker's settings.
        credentials: how members authenticate each other.

    Attributes:
        name: its name in `Config.links`.
        number: its number on the wire.
        preference: of the kinds that two members have in common, they use the one with the highest preference.
    """

    name: ClassVar[str]
    number: ClassVar[KindNumber]
    preference: ClassVar[int]

    @abc.abstractmethod
    def __init__(self, config: Config, credentials: Credentials) -> None: ...

    async def start(self, host: str) -> None:
        """Listens for peers at the door's address. Called again whenever the address changes.

        A kind that cannot listen logs the reason, and from then on expects no halves.
        """
        return

    @abc.abstractmethod
    def offer(self, context: LinkContext, hello: peer_pb2.HelloRequest) -> bool:
        """Adds to a request what the callee has to know to expect a half of this kind.

        Args:
            context: the link's context.
            hello: the request to the peer's door.

        Returns:
            True if this worker can write a half of this kind to that peer, so that the request offers it.
        """

    @abc.abstractmethod
    def expect(
        self,
        hello: peer_pb2.HelloRequest,
        context: LinkContext,
        ticket: bytes,
        on_open: Callable[[Incoming], None],
    ) -> peer_pb2.HelloResponse | None:
        """Expects a half that the caller opens with this ticket, within `TICKET_LIFETIME` seconds.

        Args:
            hello: the caller's request.
            context: the link's context.
            ticket: the ticket that the caller will show.
            on_open: takes over the half when it has come; called once, on the loop.

        Returns:
            What the caller has to know to open the half; None if the two cannot use this kind.
        """

    @abc.abstractmethod
    async def open(
        self, answer: peer_pb2.HelloResponse, context: LinkContext, stream: Outbox, timeout: float
    ) -> Outgoing:
        """Opens a half to a peer that expects it.

        Args:
            answer: what the peer's `expect` returned, with the ticket. It came over the network, so do not trust it.
            context: the link's context.
            stream: the outbox of the link's gRPC stream.
            timeout: seconds.

        Raises:
            LinkUnavailable: it cannot be opened; the text says why. The caller tries a kind of lower preference.
        """

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """Returns a new array that halves of this kind lend without a copy, None without such memory. Thread-safe."""
        return None

    def close(self) -> None:
        """Stops listening. Existing halves stay open. Idempotent."""
        return
