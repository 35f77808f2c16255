"""The contract of a link, and of the mesh of links between the members of one generation.

Rules that every link keeps, and that `paceline.testing.check_link` checks:

1. Frames arrive whole, in order, once, and unchanged: (generation, operation, part, signature, payload). A link that
   leaves the host sends a checksum with each frame (`frame.py`). If it is wrong, the link has ended, out of order:
   `recv` never returns the frame. `check_link` cannot see this; each kind of link needs a test that changes bytes.
2. `send` returns when the caller may reuse the payload. It may block for backpressure, but never past its deadline. A
   link must accept 4 frames (`_collectives.program.AHEAD`), or 8 MiB of longer ones, before it blocks.
3. `recv` blocks until a frame arrives, its deadline passes, or the link or the generation fails. It returns a frame
   that has arrived even if the deadline is past, so `recv(0.0)` polls.
4. A failure wakes a blocked call within 100 ms (I7), and every later call raises at once.
5. `close` delivers everything that was sent before it. The other side reads all of it, then gets `LinkEnded`.
6. One thread sends and one thread receives at a time; they may be different threads.
7. The receiver may read a lent payload until it releases it. The sender may use it again once `await_release` or
   `recall` has returned. `release` tells the receiver whether the sender recalled a payload while it was being read. A
   link that cannot lend sends copies.
8. A mark is the number of an operation. Marks increase, and a mark is cheaper to send than an empty frame. Up to
   `MARKS` of them wait to be read. Frames of earlier operations arrive before a mark. A link without marks says so, and
   sends nothing.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._links.fault import Fault
from paceline._links.frame import Frame
from paceline_protocol import Member
from pacelinepb import PROTOCOL_VERSION

LEND_BYTES = 16 << 10
"""Smaller payloads are never lent: copying one costs no more than waiting for its release."""

MARKS = 8
"""How many marks can wait to be read. In a barrier, a member is at most one barrier ahead of another."""

MAX_GROUP_NAME = 256
"""Longest name of a group, in bytes (peer.proto)."""


class Purpose(IntEnum):
    """The purposes of links, with the numbers of peer.proto. Links of one purpose never delay links of the other."""

    COLLECTIVE = 1
    POINT_TO_POINT = 2


class LinkEnded(ConnectionError):
    """The other side closed or broke the link.

    `orderly` is True if it closed the link after its last frame, `unopened` if the link could never be opened, and
    `version` if the other side has refused it because of the version of the protocol.
    """

    def __init__(self, message: str, *, orderly: bool = False, unopened: bool = False, version: bool = False) -> None:
        super().__init__(message)
        self.orderly = orderly
        self.unopened = unopened
        self.version = version


class LinkTimeout(TimeoutError):
    """The deadline passed before the link could send or receive."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of a generation, as links and errors need it.

    Attributes:
        rank: its rank.
        member_id: unique for ever.
        host: the name of its host, for messages and for grouping ranks by host (`split_by_host`).
        address: where its PeerService answers, "host:port"; empty on a local mesh.
        pid: its process id, 0 where unknown.
        node: the same for all members that can share memory; empty if this one shares none.
        start_ticks: when its process started, in clock ticks since its host booted; 0 where unknown.
    """

    rank: int
    member_id: str
    host: str
    address: str = ""
    pid: int = 0
    node: str = ""
    start_ticks: int = 0

    @classmethod
    def of(cls, member: Member) -> Peer:
        """Converts a member that the coordinator names."""
        process = member.process
        return cls(
            member.rank, member.member_id, process.host, member.address, process.pid, process.node, process.start_ticks
        )

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})" if self.pid else f"rank {self.rank} ({self.host})"


class Link(abc.ABC):
    """Frames to and from one peer for one purpose. See the module's rules.

    Attributes:
        peer: the member at the other end.
        kind: "local", "grpc", ...
    """

    peer: Peer
    kind: str

    @abc.abstractmethod
    def send(self, frame: Frame, deadline: float) -> None:
        """Sends a frame. `deadline` is a `time.monotonic()` value.

        Raises:
            LinkTimeout: backpressure outlasted the deadline; the frame was not sent.
            LinkEnded: the link is closed or broken.
            PacelineError: the generation has failed.
        """

    def lend(self, frame: Frame, deadline: float) -> None:
        """Sends a frame whose payload the other side may read in place until `await_release` or `recall` returns.

        Use it for payloads of `LEND_BYTES` or more.

        Raises:
            LinkTimeout, LinkEnded, PacelineError: as `send`.
        """
        self.send(frame, deadline)

    def mark(self, number: int, deadline: float) -> bool:
        """Tells the other side that this one has reached an operation.

        Args:
            number: the operation's number, above all earlier marks. At most `MARKS` may wait for the other side.
            deadline: as for `send`.

        Returns:
            False if this link has no marks, and never will. Nothing was sent then.

        Raises:
            LinkEnded, PacelineError: as `send`.
        """
        return False

    def await_mark(self, deadline: float) -> Frame | int:
        """Returns the next mark of the other side, or, as `recv` does, a frame that came instead.

        Raises:
            LinkTimeout, LinkEnded, PacelineError: as `recv`.
        """
        return self.recv(deadline)

    def await_release(self, deadline: float) -> None:
        """Waits until the other side has released every lent payload.

        Raises:
            LinkTimeout: it did not do so before the deadline.
            LinkEnded: the link is closed or broken.
            PacelineError: the generation has failed.
        """
        return

    def recall(self) -> None:
        """Takes back every lent payload. The link is not used afterwards. Waits only for a read that is under way."""
        return

    def release(self) -> None:
        """Releases the payloads of all received frames: the reader no longer needs them.

        Raises:
            LinkEnded: the other side took a payload back while this side read it, so results computed from it are
                void; or this link is closed.
        """
        return

    @abc.abstractmethod
    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        """Returns the next frame, whose payload may be read until `release`.

        Args:
            deadline: a `time.monotonic()` value.
            into: memory for a payload of exactly this length. If the link uses it, the frame's payload is this object,
                and needs no release. Its content is undefined if the call raises.

        Raises:
            LinkTimeout: no frame came before the deadline; nothing is consumed.
            LinkEnded: the other side has closed or broken the link, and all its frames have been read.
            PacelineError: the generation has failed.
        """

    @abc.abstractmethod
    def on_readable(self, notify: Callable[[], None]) -> None:
        """Calls `notify` once now, and then whenever `recv` may have something to return or to raise.

        The call comes from any thread, and sometimes without a reason. `notify` must not block. Only the last function
        registered is called.
        """

    @abc.abstractmethod
    def close(self, deadline: float) -> None:
        """Delivers what was sent, then ends the link. Waits until the deadline at most. Idempotent."""


class Mesh(abc.ABC):
    """One member's links to the other members of one generation, each opened when it is first used.

    Every group of members has links of its own under its name, so groups never wait for each other. "" is the group of
    all members.

    Attributes:
        generation: the generation.
        rank: this member's rank.
        peers: all members in rank order, including this one.
        fault: how the generation ends.
        version: the version of the protocol that all members speak; the newest if they are of one process.
    """

    version = PROTOCOL_VERSION
    generation: int
    rank: int
    peers: Sequence[Peer]
    fault: Fault

    @abc.abstractmethod
    def link(self, peer: int, purpose: Purpose, group: str = "") -> Link:
        """Returns the link to a rank for a purpose and a group: the same object each time. Does not wait for the peer.

        Raises:
            PacelineError: the generation has failed.
        """

    @abc.abstractmethod
    def linked(self, purpose: Purpose, group: str = "") -> Sequence[int]:
        """Returns the ranks to which a link for this purpose and group exists already, opened by either side."""

    @abc.abstractmethod
    def close(self, deadline: float) -> None:
        """Closes every link (`Link.close`)."""

    @abc.abstractmethod
    def close_group(self, group: str, deadline: float) -> None:
        """Closes the links of one group. Not for "", whose links end when the member leaves."""

    @property
    @abc.abstractmethod
    def bytes_sent(self) -> int:
        """Bytes that this member has handed to its links so far."""

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """The same by kind of link; empty if the kinds are not known."""
        return {}

    @property
    def encrypted(self) -> bool:
        """True if the links between hosts use TLS."""
        return False

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.peers)

    @property
    def neighbours(self) -> int:
        """The number of other members on the view's largest node: equal at all members and in all groups."""
        nodes = Counter(peer.node for peer in self.peers if peer.node)
        return max(nodes.values(), default=1) - 1

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns a new array that links can lend without a copy (`Link.lend`)."""
        return np.empty(shape, dtype)
