"""The contract of a kind of link: how frames go out to a peer, how they come in, and how the two sides find each other.

Every link has a gRPC stream in each direction, which authenticates, watches the peer, passes on aborts and says how the
link ends. Frames of operations go through halves: the sender writes an `Outgoing`, the receiver reads an `Incoming`.
The two directions of a link are negotiated apart, each by the side that writes. A `Kind` makes the halves; shared
memory, TCP and gRPC (the stream itself) are the three that Paceline comes with, and `registry.py` lists them.

Halves keep the rules of `_links.base`, all but 5, which is about the end of a whole link. One thread writes an
`Outgoing` and one reads an `Incoming` at a time; `wake`, `end` and `close` come from any thread. `wake` ends every wait
once the fault has failed (I7).
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

__all__ = ["TICKET_BYTES", "TICKET_LIFETIME", "Breach", "HalfContext", "Incoming", "Kind", "KindNumber", "Outgoing"]

TICKET_BYTES = 16
"""Length of a ticket: random, good for one half (peer.proto)."""

TICKET_LIFETIME = 10.0
"""Seconds for which a ticket is good (peer.proto)."""

KindNumber: TypeAlias = peer_pb2.LinkKind.ValueType
"""How a kind is named on the wire (peer.proto)."""


class Breach(LinkEnded):
    """What the peer sent is no frame: it has broken the protocol, and the link has ended."""


class Outgoing(abc.ABC):
    """Frames to one peer.

    Attributes:
        kind: name of the kind, as in `Config.links`.
        frames: how many were sent so far past the link's gRPC stream, which cannot count them itself.
        sent_bytes: bytes that were sent so far.
    """

    kind: str
    frames: int
    sent_bytes: int

    @abc.abstractmethod
    def send(self, frame: Frame, deadline: float) -> None:
        """Sends a frame; the payload is the caller's again on return (`Link.send`).

        Raises:
            LinkTimeout: backpressure outlasted the deadline; the frame was not sent, and the half is as before.
            LinkEnded: the half has ended.
            PacelineError: the generation has failed.
        """

    @abc.abstractmethod
    def lend(self, frame: Frame, deadline: float) -> None:
        """As `send`, but the payload may be read until `await_release` or `recall` has returned (`Link.lend`)."""

    def mark(self, number: int) -> bool:
        """See `Link.mark`."""
        return False

    @abc.abstractmethod
    def await_release(self, deadline: float) -> None:
        """Waits until the peer no longer reads what was lent (`Link.await_release`)."""

    @abc.abstractmethod
    def recall(self) -> None:
        """Takes back what was lent: on return nothing here reads it, and the peer believes none of it any more.

        Only once the generation has failed, or the half has ended. It waits for nothing but this process's own threads.
        """

    @abc.abstractmethod
    def flush(self, deadline: float) -> None:
        """Waits until all that was sent is with the kernel, or the peer, and would survive this process's end."""

    def stuck_for(self, now: float) -> float:
        """For how many seconds the peer's host has not acknowledged what is on its way, as far as this was looked at.

        A peer that computes, or is frozen, has a host that acknowledges; one that is cut off has not.
        """
        return 0.0

    @abc.abstractmethod
    def wake(self) -> None:
        """Makes blocked calls look at the fault."""

    @abc.abstractmethod
    def end(self, error: LinkEnded) -> None:
        """The peer is gone: blocked calls and later ones raise this."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back descriptors and memory. No other call follows. Idempotent."""


class Incoming(abc.ABC):
    """Frames from one peer.

    Attributes:
        kind: name of the kind, as in `Config.links`.
    """

    kind: str

    @abc.abstractmethod
    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        """The next frame (`Link.recv`); its payload may be read until `release`.

        Args:
            deadline: a `time.monotonic()` value.
            into: where a payload of just this length may be put (bytes, contiguous, writable). If it is, the frame's
                payload is this very object, and need not be released. What is there is undefined if the call raises.

        Raises:
            LinkTimeout: no whole frame came before the deadline; nothing is consumed, and a later call goes on.
            LinkEnded: the peer has closed or broken the link, and all frames that it sent are read.
            PacelineError: the generation has failed.
        """

    def await_mark(self, deadline: float) -> Frame | int:
        """See `Link.await_mark`."""
        return self.recv(deadline)

    @abc.abstractmethod
    def release(self) -> None:
        """The payloads received so far are needed no longer.

        Raises:
            LinkEnded: the peer had taken one back while it was being read: what was made of it is void.
        """

    @abc.abstractmethod
    def on_readable(self, notify: Callable[[], None]) -> None:
        """See `Link.on_readable`."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Makes a blocked call look at the fault."""

    @abc.abstractmethod
    def end(self, error: LinkEnded, frames: int | None = None) -> None:
        """Nothing follows after so many frames in all; None: after what is here."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back descriptors and memory. No other call follows. Idempotent."""


@dataclass(frozen=True, slots=True)
class HalfContext:
    """What a kind is told of the link that a half is for.

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
    """One kind of link, as one worker has it. Everything but `empty` runs on the loop.

    Args:
        config: the worker's settings.
        credentials: by what members know each other.

    Attributes:
        name: as in `Config.links`.
        number: its number on the wire.
        preference: two members use the kind with the highest preference of those that both have.
    """

    name: ClassVar[str]
    number: ClassVar[KindNumber]
    preference: ClassVar[int]

    @abc.abstractmethod
    def __init__(self, config: Config, credentials: Credentials) -> None: ...

    async def start(self, host: str) -> None:
        """Listens for peers beside the door, at its address; again whenever that changes.

        A kind that cannot listen logs why, and from then on expects nothing.
        """
        return

    @abc.abstractmethod
    def is_for(self, context: HalfContext) -> bool:
        """True if this worker may write a half of this kind to that peer: it is offered to the peer's door."""

    def introduce(self, hello: peer_pb2.HelloRequest) -> None:
        """Adds to a request that offers this kind what the callee must know to expect it."""
        return

    @abc.abstractmethod
    def expect(
        self,
        hello: peer_pb2.HelloRequest,
        context: HalfContext,
        ticket: bytes,
        came: Callable[[Incoming], None],
    ) -> peer_pb2.HelloResponse | None:
        """Expects a half that the caller opens with this ticket, within `TICKET_LIFETIME` seconds.

        Args:
            hello: the caller's request.
            context: of the link.
            ticket: what the caller will show.
            came: whose the half is when it has come; to be called on the loop, once.

        Returns:
            What the caller must know to open the half; None if the two cannot use this kind.
        """

    @abc.abstractmethod
    async def open(
        self, answer: peer_pb2.HelloResponse, context: HalfContext, stream: Outbox, timeout: float
    ) -> Outgoing:
        """Opens a half to a peer that expects it.

        Args:
            answer: what the peer's `expect` returned, with the ticket; from the network, so not to be trusted.
            context: of the link.
            stream: what the link's gRPC stream writes.
            timeout: seconds.

        Raises:
            LinkUnavailable: it cannot be opened, and the text says why. A kind of lower preference is tried.
        """

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """A new array that halves of this kind lend without a copy; None if there is no such memory. In any thread."""
        return None

    def close(self) -> None:
        """Stops listening. Halves that were made stay. Idempotent."""
        return
