"""Frames of collectives, out and in; and what a member does that has waited for long.

Most disagreements show in the first frame that arrives. Some show in none: where two ranks name different roots, both
may wait for each other, or for a rank that has nothing to send. So a member that has waited for `PATIENCE` tells the
one it waits for which call it is in, and looks at what others have sent it. Somewhere in every circle of waiting
stands a member that holds the proof, and there the disagreement is found.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from time import monotonic

from paceline.links.base import Link, LinkEnded, LinkTimeout, Mesh, Purpose
from paceline.links.frame import Frame, FrameKind

__all__ = ["PATIENCE", "WAITING", "Disagreement", "Exchange"]

PATIENCE = 2.0
"""Seconds to wait before asking around; longer than most honest steps."""

WAITING = 0xFFFF_FFFF
"""Part number of the frame "I wait for you in this operation"; it has a signature and no payload."""

_HISTORY = 64
"""Calls remembered. A rank may run ahead of another by as many calls as fit in a link, and these are few."""


class Disagreement(Exception):
    """A peer's frame shows that it is in another call.

    Attributes:
        peer: the peer's rank.
        mine: signature of this member's call of that number.
        frame: the peer's frame.
    """

    def __init__(self, peer: int, mine: bytes, frame: Frame) -> None:
        super().__init__(peer, mine, frame)
        self.peer = peer
        self.mine = mine
        self.frame = frame


class Exchange:
    """Sends and receives over all links for collectives. One thread uses it at a time."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._links: dict[int, Link] = {}
        self._early: dict[int, Frame] = {}  # found while looking around, to be read later; one from a rank at most
        self._calls: deque[tuple[int, bytes]] = deque(maxlen=_HISTORY)  # operation and signature, newest last

    def begin(self, operation: int, signature: bytes) -> None:
        """This member enters a call."""
        self._calls.append((operation, signature))

    def link(self, peer: int) -> Link:
        """The link to a rank."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = self._mesh.link(peer, Purpose.COLLECTIVE)
        return link

    def send(self, peer: int, frame: Frame, deadline: float) -> None:
        """Sends a frame to a rank.

        Raises:
            Disagreement: some rank is in another call than this member.
            LinkTimeout: the deadline has passed.
            LinkEnded: the link is gone.
            PacelineError: the generation has failed.
        """
        link = self._links.get(peer) or self.link(peer)
        while True:
            try:
                link.send(frame, min(deadline, monotonic() + PATIENCE))
            except LinkTimeout:
                if monotonic() >= deadline:
                    raise
                self._look_around()  # two ranks that both send, where one should receive, find out here
            else:
                return

    def recv(self, peer: int, deadline: float) -> Frame:
        """The next frame from a rank.

        Raises:
            Disagreement: some rank is in another call than this member.
            LinkTimeout: the deadline has passed.
            LinkEnded: the link is gone.
            PacelineError: the generation has failed.
        """
        link = self._links.get(peer) or self.link(peer)
        asked = False
        while True:
            if self._early and (early := self._early.pop(peer, None)) is not None:
                return early
            try:
                frame = link.recv(min(deadline, monotonic() + PATIENCE))
            except LinkTimeout:
                if monotonic() >= deadline:
                    raise
                if not asked:
                    self._tell(link)
                self._look_around(peer)
                asked = True
                continue
            if frame.part != WAITING:
                return frame
            self.compare(peer, frame)

    def _tell(self, link: Link) -> None:
        operation, signature = self._calls[-1]
        note = Frame(FrameKind.DATA, self._mesh.generation, operation, WAITING, signature, b"")
        with suppress(LinkTimeout):  # if it cannot go out, what is on its way already says as much
            link.send(note, monotonic())

    def _look_around(self, awaited: int | None = None) -> None:
        """Takes in what others than the one awaited have sent, one frame each, and compares."""
        for peer in self._mesh.linked(Purpose.COLLECTIVE):  # whoever has sent something is among them
            if peer == awaited or peer in self._early:
                continue
            try:
                frame = self.link(peer).recv(monotonic())
                while frame.part == WAITING:
                    self.compare(peer, frame)
                    frame = self.link(peer).recv(monotonic())
            except (LinkTimeout, LinkEnded):
                continue  # an end counts when something is awaited from there
            self._early[peer] = frame
            self.compare(peer, frame)

    def compare(self, peer: int, frame: Frame) -> None:
        """Compares what a frame says with this member's call of the same number, if it has come so far.

        Raises:
            Disagreement: they differ.
        """
        if not frame.signature:
            return
        for operation, mine in reversed(self._calls):
            if operation == frame.operation and not _agree(mine, frame.signature):
                raise Disagreement(peer, mine, frame)


def _agree(a: bytes, b: bytes) -> bool:
    """True if two signatures can be of one call; the receiver of a broadcast may have left out the array."""
    return a == b or a.startswith(b + b" ") or b.startswith(a + b" ")
