"""A link between two members: a gRPC stream each way, and a faster way out or in where both sides have one.

The stream authenticates, watches the peer, passes on aborts and says how the link ends. What kind of half carries the
frames of operations is settled when the peer's door has answered (`negotiation.py`): until then `send` waits, unless
gRPC is all that this member has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from paceline._wait import SLICE, Latch
from paceline.errors import PacelineError
from paceline.links.base import Link, LinkEnded, LinkTimeout, Peer
from paceline.links.fault import Fault, Suspicion
from paceline.links.frame import Frame, FrameKind, encode
from paceline.links.grpc_queues import Inbox, Outbox
from paceline.links.halves import Breach, Outgoing
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["MemberLink"]


class MemberLink(Link):
    """One member's end of a link.

    Args:
        peer: the member at the other end.
        inbox: frames from it.
        outbox: frames to it by gRPC.
        fault: how the generation ends.

    Attributes:
        inbox: as given.
        outbox: as given.
        drained: set once the peer has taken in everything, or will not any more.
    """

    def __init__(self, peer: Peer, inbox: Inbox, outbox: Outbox, fault: Fault) -> None:
        self.peer = peer
        self.kind = "grpc"
        self.inbox = inbox
        self.outbox = outbox
        self.drained = Latch()
        self._fault = fault
        self._half: Outgoing | None = None
        self._settled = Latch()
        self._sending = self._receiving = self._shut = False
        fault.on_failure(self._wake)

    # For the calling threads. What each frame passes is written out: one call less, and a small sum takes 1 % less.

    def send(self, frame: Frame, deadline: float) -> None:
        """See `Link.send`."""
        self._send(frame, deadline, lend=False)

    def lend(self, frame: Frame, deadline: float) -> None:
        """See `Link.lend`; gRPC copies."""
        self._send(frame, deadline, lend=True)

    def _send(self, frame: Frame, deadline: float, *, lend: bool) -> None:
        self._sending = True  # before the look at `_shut`: `shut` looks the other way round
        try:
            half = self._half
            if half is None or self._shut or self.outbox.closing:
                half = self._way_out(deadline)
            if half is None:
                self.outbox.put(encode(frame), deadline, self._fault)
            elif lend:
                half.lend(frame, deadline)
            else:
                half.send(frame, deadline)
        finally:
            self._sending = False
            if self._shut:
                self._close_out()

    def mark(self, number: int, deadline: float) -> bool:
        """See `Link.mark`; only shared memory has them."""
        self._sending = True
        try:
            half = self._way_out(deadline)
            return half is not None and half.mark(number)
        finally:
            self._done_sending()

    def _done_sending(self) -> None:
        self._sending = False
        if self._shut:
            self._close_out()

    def _way_out(self, deadline: float) -> Outgoing | None:
        """The faster way, once it is known; None for gRPC, or if this link is closed here: the outbox says so."""
        if self._half is None and not self._settled.is_set():
            self._await_half(deadline)
        return None if self._shut or self.outbox.closing else self._half

    def _await_half(self, deadline: float) -> None:
        while not self._settled.wait(max(0.0, min(SLICE, deadline - time.monotonic()))):
            self._fault.check()
            if time.monotonic() >= deadline:
                raise LinkTimeout("the peer has not answered")

    def settle(self, deadline: float) -> None:
        """See `Link.settle`."""
        if self._half is None:
            return
        self._sending = True
        try:
            if self._shut:
                self._fault.check()
                raise LinkEnded("the link is closed", orderly=True)
            self._half.settle(deadline)
        finally:
            self._done_sending()

    def recall(self) -> None:
        """See `Link.recall`."""
        if self._half is None:
            return
        self._sending = True
        try:
            if not self._shut:
                self._half.recall()
        finally:
            self._done_sending()

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        """See `Link.recv`; the payload is a view of what the peer sent."""
        self._receiving = True
        try:
            if self._shut:
                self._fault.check()
                raise LinkEnded("the link is closed", orderly=True)
            return self.inbox.get(deadline, self._fault, into)
        except Breach as breach:
            raise self._broke_protocol(breach) from None
        finally:
            self._receiving = False
            if self._shut:
                self.inbox.close()

    def await_mark(self, deadline: float) -> Frame | int:
        """See `Link.await_mark`."""
        self._receiving = True
        try:
            if self._shut:
                self._fault.check()
                raise LinkEnded("the link is closed", orderly=True)
            return self.inbox.await_mark(deadline, self._fault)
        except Breach as breach:
            raise self._broke_protocol(breach) from None
        finally:
            self._receiving = False
            if self._shut:
                self.inbox.close()

    def _broke_protocol(self, breach: Breach) -> PacelineError:
        text = f"{self.peer} broke the protocol: {breach}"
        self._fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL, self.peer.rank, 0, text))
        return self._fault.error()

    def release(self) -> None:
        """See `Link.release`. Once this is shut, nobody can say if what was read had been taken back.

        That raises no error of the generation's, as others do: operations that fail release too, and have their own.
        """
        self._receiving = True
        try:
            if self._shut:
                raise LinkEnded("the link is closed", orderly=True)
            self.inbox.release()
        finally:
            self._receiving = False
            if self._shut:
                self.inbox.close()

    def on_readable(self, notify: Callable[[], None]) -> None:
        """See `Link.on_readable`."""
        self.inbox.on_readable(notify)

    def close(self, deadline: float) -> None:
        """See `Link.close`: says that nothing follows, and waits for the peer's word that it has taken in all."""
        self.half_close(FrameKind.LEAVE, deadline)
        self.drained.wait(max(0.0, deadline - time.monotonic()))

    def half_close(self, kind: Literal[FrameKind.CLOSE, FrameKind.LEAVE], deadline: float) -> None:
        """Says that nothing follows here, or anywhere; waits only for what was sent to be with the kernel."""
        half = self._half
        if half is not None and not self._shut and not self.closing:
            with suppress(LinkEnded, LinkTimeout, PacelineError):  # the peer counts, and finds out what is missing
                half.flush(deadline)
        sent = half.frames if half is not None else 0
        self.outbox.close(encode(Frame(kind, self._fault.generation, sent, 0, b"", b"")))

    # For the mesh; most of it on the loop.

    @property
    def closing(self) -> bool:
        """True once this side has said that nothing follows."""
        return self.outbox.closing

    @property
    def sent_bytes(self) -> int:
        """Bytes sent so far, with the headers where they go by gRPC."""
        return self.outbox.sent_bytes + (self._half.sent_bytes if self._half is not None else 0)

    def stuck_for(self, now: float) -> float:
        """See `Outgoing.stuck_for`; of gRPC its own keepalive takes care."""
        return 0.0 if self._half is None or self._shut else self._half.stuck_for(now)

    def settle_on(self, half: Outgoing | None) -> None:
        """Frames go this way from now on; None for gRPC. Idempotent."""
        if half is not None:
            self._half, self.kind = half, half.kind
            if self._shut:  # it opened too late for `shut` to see it
                self._close_out()
        self._settled.set()

    def end_out(self, error: LinkEnded) -> None:
        """The peer takes nothing any more."""
        self.outbox.end(error)
        if self._half is not None and not self._shut:
            self._half.end(error)
        self._settled.set()

    def forget(self) -> None:
        """Hears of no failure any more."""
        self._fault.forget(self._wake)

    def shut(self) -> None:
        """Gives back what the faster ways take, once no thread is inside. Idempotent."""
        self._shut = True
        self._wake()
        if not self._sending:
            self._close_out()
        if not self._receiving:
            self.inbox.close()

    def _close_out(self) -> None:
        if self._half is not None:
            self._half.close()

    def _wake(self) -> None:
        self.inbox.wake()
        self.outbox.wake()
        if self._half is not None:
            self._half.wake()
        self.drained.set()  # nobody will drain it any more
