"""Sends and receives the frames of collectives, and finds disagreements when a member has waited for long.

Most disagreements show in the first frame that arrives. Some show in none: if two ranks name different roots, both may
wait for each other, or for a rank that has nothing to send. So a member that has waited for `PATIENCE` tells the rank
that it waits for which call it is in, and looks at what others have sent. Among members that wait for each other in a
circle, at least one sees the difference and reports it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import TypeAlias, TypeVar

from paceline._links.base import Link, LinkEnded, LinkTimeout, Mesh, Purpose
from paceline._links.frame import Frame, FrameKind

M = TypeVar("M")

History: TypeAlias = Callable[[int], bytes | None]
"""Returns the signature of this member's operation with a number; None if it is forgotten."""

PATIENCE = 2.0
"""Seconds to wait before looking around; longer than most normal steps take."""

WAITING = 0xFFFF_FFFF
"""Part number of a note, "I wait for you in this operation": a frame with a signature and no payload."""


_NOTES = 8
"""Most notes of a peer that one look around receives; a correct peer sends one for each operation."""


class Disagreement(Exception):
    """A peer's frame shows that it is in another call than this member, whose call of that number is `mine`."""

    def __init__(self, peer: int, mine: bytes, frame: Frame) -> None:
        super().__init__(peer, mine, frame)
        self.peer = peer
        self.mine = mine
        self.frame = frame


class Exchange:
    """Sends and receives over all links for collectives. One thread uses it at a time.

    Calls raise `Disagreement` if some rank is in another call than this member, and otherwise what `Link` raises.
    `lent` has the ranks that may still read arrays lent to them. `releasing` is the rank that took back an array while
    this member read it. `patience_s` is how long a call waits before it looks around.
    """

    def __init__(self, mesh: Mesh, history: History, *, patience_s: float = PATIENCE) -> None:
        self._mesh = mesh
        self._history = history
        self.patience_s = patience_s
        self.lent: set[int] = set()
        self.releasing: int | None = None
        self._taken: dict[int, None] = {}  # ranks from which a received frame may not be released yet
        self._links: dict[int, Link] = {}
        self._early: dict[int, Frame] = {}  # by rank, one frame found while looking around, to be read later
        self._call = (0, b"")  # operation and signature

    def begin(self, operation: int, signature: bytes) -> None:
        """Notes that this member enters a call."""
        self._call = (operation, signature)

    def link(self, peer: int) -> Link:
        """Returns the link to a rank."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = self._mesh.link(peer, Purpose.COLLECTIVE)
        return link

    def send(self, peer: int, frame: Frame, deadline: float, *, lend: bool = False) -> None:
        """Sends a frame to a rank, or lends it."""
        link = self._links.get(peer) or self.link(peer)
        if lend:
            self.lent.add(peer)
        self._patiently(link.lend if lend else link.send, deadline, frame)

    def _patiently(self, act: Callable[..., M], deadline: float, *args: object) -> M:
        """Calls `act(*args, until)` with short deadlines until it succeeds, and looks around in between."""
        while True:
            until = monotonic() + self.patience_s
            try:
                return act(*args, until if until < deadline else deadline)
            except LinkTimeout:
                if monotonic() >= deadline:
                    raise
                self._look_around()  # finds two ranks that both send, though one should receive

    def recv(self, peer: int, deadline: float, into: memoryview | None = None) -> Frame:
        """Receives the next frame from a rank; the link may put its payload in `into` (`Link.recv`)."""
        link, held = self._links.get(peer) or self.link(peer), peer in self._taken
        frame = self._receive(peer, link, link.recv, deadline, into)
        if not held and frame.payload is into:  # the payload uses no memory of the link
            del self._taken[peer]
        return frame

    def mark(self, peer: int, number: int, deadline: float) -> bool:
        """Sends a mark to a rank; returns False if a frame must be sent instead (`Link.mark`)."""
        link = self._links.get(peer) or self.link(peer)
        return self._patiently(link.mark, deadline, number)

    def await_mark(self, peer: int, deadline: float) -> Frame | int:
        """Waits for the next mark of a rank; returns it, or a frame that came instead (`Link.await_mark`)."""
        link = self._links.get(peer) or self.link(peer)
        early = self._early.get(peer)
        if early is not None and early.operation > self._call[0]:
            self._taken[peer] = None
            try:  # a rank that is ahead has sent its mark already, or never sends one
                return link.await_mark(monotonic())
            except LinkTimeout:
                pass
        return self._receive(peer, link, link.await_mark, deadline)

    def _receive(self, peer: int, link: Link, receive: Callable[..., M], deadline: float, *args: object) -> Frame | M:
        self._taken[peer] = None  # set first: an interrupt may come between a frame's arrival and the next line
        asked = False
        while True:
            if self._early and (early := self._early.pop(peer, None)) is not None:
                return early
            until = monotonic() + self.patience_s
            try:
                frame = receive(until if until < deadline else deadline, *args)
            except LinkTimeout:
                if monotonic() >= deadline:
                    raise
                asked = asked or self._tell(link)
                self._look_around(peer)
                continue
            if not isinstance(frame, Frame) or frame.part != WAITING:
                return frame
            self.compare(peer, frame)
            if monotonic() >= deadline:  # notes do not extend the deadline
                raise LinkTimeout("nothing but notes came")

    @property
    def holds_frames(self) -> bool:
        """Returns True if a received frame may not be released yet."""
        return bool(self._taken)

    def release(self) -> None:
        """Releases the payloads of all frames received so far.

        Raises LinkEnded after that, if the rank `releasing` had taken back what was being read.
        """
        taken_back: LinkEnded | None = None
        for peer in self._taken:
            try:
                self._release(peer)
            except LinkEnded as error:
                taken_back = taken_back or error
        self._taken.clear()
        if taken_back is not None:
            raise taken_back

    def _release(self, peer: int) -> None:
        try:
            self._links[peer].release()
        except LinkEnded:
            self.releasing = peer if self.releasing is None else self.releasing
            raise

    def await_release(self, peer: int, deadline: float) -> None:
        """Waits until a rank has released everything that was lent to it."""
        self._patiently(self._links[peer].await_release, deadline)
        self.lent.discard(peer)

    def recall(self) -> None:
        """Takes back everything that was lent."""
        for peer in self.lent:
            self._links[peer].recall()
        self.lent.clear()

    def ask(self, peer: int, deadline: float) -> None:
        """Tells a rank that is ahead which call this member is in, and gives it time to compare before the deadline.

        If the rank has compared, this raises its error, which names both calls.
        """
        compared = threading.Event()
        self._mesh.fault.on_failure(compared.set)
        self._tell(self.link(peer))
        # The rank looks around only after it has waited for `patience_s`. Other ranks' deadlines are close to ours.
        compared.wait(max(0.0, min(self.patience_s + 0.5, (deadline - monotonic()) / 2)))
        self._mesh.fault.forget(compared.set)
        self._mesh.fault.check()

    def _tell(self, link: Link) -> bool:
        """Tells a rank which call this member is in; returns False if the link is still being dialled."""
        operation, signature = self._call
        note = Frame(FrameKind.DATA, self._mesh.generation, operation, WAITING, signature, b"")
        try:
            link.send(note, monotonic())
        except LinkTimeout:
            return False
        return True

    def _look_around(self, awaited: int | None = None) -> None:
        """Receives one frame from every rank except the awaited one, and compares its call with this member's."""
        for peer in self._mesh.linked(Purpose.COLLECTIVE):  # includes every rank that has sent something
            if peer == awaited or peer in self._early:
                continue
            link, copied = self.link(peer), False
            try:
                frame = self._first_of(peer, link)
                if frame is not None:
                    self.compare(peer, frame)
                    # Copied, so that its sender need not wait until this member reads it.
                    self._early[peer] = replace(frame, payload=bytes(frame.payload))
                    copied = peer not in self._taken
            finally:
                if copied:
                    self._release(peer)
                elif peer not in self._taken:  # otherwise a frame of it may still be needed
                    with suppress(LinkEnded):  # only notes were read, and they are not needed
                        link.release()

    def _first_of(self, peer: int, link: Link) -> Frame | None:
        """Compares the notes that have come from a rank; returns the first frame after them, or None."""
        for _ in range(_NOTES):
            try:
                frame = link.recv(monotonic())
            except (LinkTimeout, LinkEnded):
                return None  # the end of a link matters only once this member waits for that rank
            if frame.part != WAITING:
                return frame
            self.compare(peer, frame)
        return None

    def compare(self, peer: int, frame: Frame) -> None:
        """Compares the call that a frame names with this member's of that number, if made; raises Disagreement."""
        if not frame.signature:
            return
        operation, mine = self._call
        if operation != frame.operation:
            mine = self._history(frame.operation) or frame.signature
        if not _agree(mine, frame.signature):
            raise Disagreement(peer, mine, frame)


def _agree(a: bytes, b: bytes) -> bool:
    """Returns True if two signatures can belong to one call; a receiver of a broadcast may have left out the array."""
    return a == b or a.startswith(b + b" ") or b.startswith(a + b" ")
