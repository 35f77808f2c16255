"""A link that is nothing but its halves, of either kind, whose other end is in this process too.

What the gRPC side of a link says in real life (who left, after how many frames) is said here by a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline._links.base import Link, LinkEnded, Peer
from paceline._links.fault import Fault
from paceline._links.frame import Frame

__all__ = ["HalvesLink", "MarkedLink", "soon"]


def soon(seconds: float = 10.0) -> float:
    """A deadline that only what hangs comes to."""
    return time.monotonic() + seconds


class HalvesLink(Link):
    """One end.

    Args:
        kind: of link.
        peer: who is at the other end.
        out: the way there.
        into: the way back.
        fault: how the generation ends.
    """

    def __init__(self, kind: str, peer: Peer, out: Any, into: Any, fault: Fault) -> None:
        self.kind = kind
        self.peer = peer
        self.out = out
        self.into = into
        self.other: HalvesLink | None = None
        fault.on_failure(out.wake)
        fault.on_failure(into.wake)

    def send(self, frame: Frame, deadline: float) -> None:
        self.out.send(frame, deadline)

    def lend(self, frame: Frame, deadline: float) -> None:
        self.out.lend(frame, deadline)

    def await_release(self, deadline: float) -> None:
        self.out.await_release(deadline)

    def recall(self) -> None:
        self.out.recall()

    def release(self) -> None:
        self.into.release()

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        return self.into.recv(deadline, into)  # type: ignore[no-any-return]

    def on_readable(self, notify: Callable[[], None]) -> None:
        self.into.on_readable(notify)

    def close(self, deadline: float) -> None:
        """Orderly: what waits is written, and the other side told how many frames there were."""
        self.out.flush(deadline)
        assert self.other is not None
        self.other.into.end(LinkEnded("the other side left", orderly=True), self.out.frames)
        self.out.end(LinkEnded("this side left", orderly=True))

    def cut(self) -> None:
        """As the death of the process at this end: the control channel of the other end breaks too."""
        for half in (self.out, self.into):
            half.end(LinkEnded("this side is dead"))
        for stream in getattr(self.out, "_streams", ()):
            stream.shut()
        assert self.other is not None
        self.other.into.end(LinkEnded("the other side died"))
        self.other.out.end(LinkEnded("the other side died"))

    def free(self) -> None:
        self.out.close()
        self.into.close()


class MarkedLink(HalvesLink):
    """One that can be marked, as those over shared memory."""

    def mark(self, number: int, deadline: float) -> bool:
        return self.out.mark(number)  # type: ignore[no-any-return]

    def await_mark(self, deadline: float) -> Frame | int:
        return self.into.await_mark(deadline)  # type: ignore[no-any-return]
