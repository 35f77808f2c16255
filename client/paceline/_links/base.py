"""The contract of a link, and of the mesh of links between the members of one generation.

Rules that every link keeps, and that `paceline.testing.check_link` checks:

1. Frames arrive whole, in order, once, and unchanged: (generation, operation, part, signature, payload). A link that
   leaves the host sends a checksum with each frame (`frame.py`). If it is wrong, the link has ended, out of order:
   `recv` never returns the frame. `check_link` cannot see this; each kind of link needs a test that changes bytes.
2. `send` returns when the caller may reuse the payload. It may block for backpressure, but never past its deadline. A
   link must accept 4 frames (`_collectives.program.AHEAD`), or 8 MiB of longer ones, before it blocks.
3. `recv` blocks until a frame is there, its deadline has passed, or the link or the generation has failed. A frame
   that is there is returned even if the deadline is past: `recv(0.0)` polls.
4. A failure wakes a blocked call within 100 ms (I7), and every later call raises at once.
5. `close` delivers what was sent before it; the other side reads all of it, then gets `LinkEnded`.
6. One thread sends and one thread receives at a time; they may be different threads.
7. What was lent is the receiver's to read until it releases it, and the sender's again once `await_release` or `recall`
   has returned. `release` tells the receiver whether something was recalled while it was read. A link that cannot lend
   sends copies.
8. A mark is the number of an operation, each above the one before: cheaper to tell than an empty frame. Up to `MARKS`
   of them wait to be read. Frames of earlier operations come before a mark. A link that has no marks says so, and
   tells nothing.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._links.fault import Fault
from paceline._links.frame import Frame

__all__ = [
    "LEND_BYTES",
    "MARKS",
    "MAX_GROUP_NAME",
    "Link",
    "LinkEnded",
    "LinkTimeout",
    "Mesh",
    "Peer",
    "Purpose",
]


LEND_BYTES = 16 << 10
"""Smaller payloads are never lent: a copy costs no more than to wait until they are released."""

MARKS = 8
"""Marks that wait to be read. A member of a barrier is one barrier ahead of another at most."""

MAX_GROUP_NAME = 256
"""Longest name of a group, in bytes (peer.proto)."""


class Purpose(IntEnum):
    """What a link is for; the numbers are those of the proto. One never holds up another."""

    COLLECTIVE = 1
    POINT_TO_POINT = 2


class LinkEnded(ConnectionError):
    """The other side closed or broke the link. `orderly`: it closed it after its last frame."""

    def __init__(self, message: str, *, orderly: bool = False) -> None:
        super().__init__(message)
        self.orderly = orderly


class LinkTimeout(TimeoutError):
    """The deadline passed before the link could send or receive."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of a generation, as links and errors need it.

    Attributes:
        rank: its rank.
        member_id: unique for ever.
        host: its host, by name: for people, and for what keeps together what is near (`split_by_host`).
        address: where its PeerService answers, "host:port"; empty on a local mesh.
        pid: its process id, 0 where unknown.
        node: alike for members that can share memory; empty where it shares none.
        start_ticks: when its process started, in clock ticks since its host booted; 0 where unknown.
    """

    rank: int
    member_id: str
    host: str
    address: str = ""
    pid: int = 0
    node: str = ""
    start_ticks: int = 0

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
        """Sends a frame whose payload the other side may read where it lies.

        It may do so until `await_release` or `recall` returns. For payloads of `LEND_BYTES` or more.

        Raises:
            LinkTimeout, LinkEnded, PacelineError: as `send`.
        """
        self.send(frame, deadline)

    def mark(self, number: int, deadline: float) -> bool:
        """Tells the other side that this one has come to an operation.

        Args:
            number: of the operation, above all that it was told before; not the next but `MARKS` before it answers.
            deadline: as for `send`.

        Returns:
            False if this link has no marks, and never will: nothing was told.

        Raises:
            LinkEnded, PacelineError: as `send`.
        """
        return False

    def await_mark(self, deadline: float) -> Frame | int:
        """The next mark of the other side; or a frame, which came instead, as from `recv`.

        Raises:
            LinkTimeout, LinkEnded, PacelineError: as `recv`.
        """
        return self.recv(deadline)

    def await_release(self, deadline: float) -> None:
        """Waits until the other side has released all that was lent.

        Raises:
            LinkTimeout: it has not before the deadline.
            LinkEnded: the link is closed or broken.
            PacelineError: the generation has failed.
        """
        return

    def recall(self) -> None:
        """Takes back all that was lent, when this link is used no more; waits only for what is being read just now."""
        return

    def release(self) -> None:
        """The reader needs the payloads of the frames that it has received no longer.

        Raises:
            LinkEnded: the other side had taken one back while it was being read, so what was made of it is void; or
                this link is closed.
        """
        return

    @abc.abstractmethod
    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        """The next frame; its payload may be read until `release`.

        Args:
            deadline: a `time.monotonic()` value.
            into: where a payload of just this length may be put; then the frame's payload is this very object, and need
                not be released. What is there is undefined if the call raises.

        Raises:
            LinkTimeout: none came before the deadline; nothing is consumed.
            LinkEnded: the other side has closed or broken the link and all its frames are read.
            PacelineError: the generation has failed.
        """

    @abc.abstractmethod
    def on_readable(self, notify: Callable[[], None]) -> None:
        """Has `notify` called, once now and then whenever `recv` may have got something to return or to raise.

        Called in any thread, sometimes for nothing; it must not block. One reader only: the last one registered.
        """

    @abc.abstractmethod
    def close(self, deadline: float) -> None:
        """Delivers what was sent, then ends the link; waits for that until the deadline at most. Idempotent."""


class Mesh(abc.ABC):
    """One member's links to the other members of one generation, opened when first used.

    Every group of members has links of its own, by its name: groups never wait for each other. "" is all members.

    Attributes:
        generation: the generation.
        rank: this member's rank.
        peers: all members in rank order, this one too.
        fault: how the generation ends.
    """

    generation: int
    rank: int
    peers: Sequence[Peer]
    fault: Fault

    @abc.abstractmethod
    def link(self, peer: int, purpose: Purpose, group: str = "") -> Link:
        """The link to a rank for a purpose and a group; the same object each time. Does not block on the peer.

        Raises:
            PacelineError: the generation has failed.
        """

    @abc.abstractmethod
    def linked(self, purpose: Purpose, group: str = "") -> Sequence[int]:
        """Ranks to which a link for this purpose and group exists already, opened by either side."""

    @abc.abstractmethod
    def close(self, deadline: float) -> None:
        """Closes every link (`Link.close`)."""

    @abc.abstractmethod
    def close_group(self, group: str, deadline: float) -> None:
        """Closes the links of one group; not for "", whose end is that of the member."""

    @property
    @abc.abstractmethod
    def bytes_sent(self) -> int:
        """Bytes that this member has handed to its links so far."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.peers)

    @property
    def neighbours(self) -> int:
        """Other members on the node of the view that has most of them: the same at all members, and in all groups."""
        nodes = Counter(peer.node for peer in self.peers if peer.node)
        return max(nodes.values(), default=1) - 1

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A new array that links can lend without a copy (`Link.lend`)."""
        return np.empty(shape, dtype)
