"""The two halves of a link that carries frames past gRPC: the way out to a peer, and the way in from it.

A link's gRPC stream authenticates, watches the peer, passes on aborts and says how the link ends. Frames of operations
go there too, unless both sides have something faster: then they go through a half of another kind. The two directions
of a link are negotiated apart, each by the side that writes.

Rules for all kinds are those of `links.base`: 1 to 4 and 6 to 8 hold for the halves alike. One thread writes an
`Outgoing` and one reads an `Incoming` at a time; `wake`, `end` and `close` come from any thread. Every wait is woken by
`wake` when the fault has failed (I7).
"""

from __future__ import annotations

import abc
from collections.abc import Callable

from paceline.links.base import LinkEnded
from paceline.links.frame import Frame

__all__ = ["Breach", "Incoming", "Outgoing"]


class Breach(LinkEnded):
    """What the peer sent is no frame: it has broken the protocol, and the link has ended."""


class Outgoing(abc.ABC):
    """Frames to one peer.

    Attributes:
        kind: "shm" or "tcp".
        frames: how many were sent so far.
        sent_bytes: payload bytes that were sent so far.
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
        """As `send`, but the payload may be read until `settle` or `recall` has returned (`Link.lend`)."""

    def mark(self, number: int) -> bool:
        """See `Link.mark`."""
        return False

    @abc.abstractmethod
    def settle(self, deadline: float) -> None:
        """Waits until nobody reads what was lent (`Link.settle`)."""

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
        """Gives back descriptors and memory. Nobody calls anything else afterwards. Idempotent."""


class Incoming(abc.ABC):
    """Frames from one peer.

    Attributes:
        kind: "shm" or "tcp".
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
        """Gives back descriptors and memory. Nobody calls anything else afterwards. Idempotent."""
