"""A link between two members: a gRPC stream each way, and in each direction a half that carries the frames.

The stream authenticates, watches the peer, passes on aborts and says how the link ends. The peer's door chooses the
kind of this member's half: shared memory, TCP or gRPC (`registry.py`). `send` waits until the door has answered. The
peer's half may come before or after this member first uses the link. `recv` waits until it has come.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from paceline._base.waits import SLICE, Latch
from paceline._links.base import Link, LinkEnded, LinkTimeout, Peer
from paceline._links.fault import Fault, Suspicion
from paceline._links.frame import Frame, FrameKind, encode
from paceline._links.kind import Incoming, Outgoing, ProtocolError
from paceline._links.outbox import Outbox
from paceline.errors import PacelineError
from pacelinepb.v1.errors_pb2 import ErrorReason


class MemberLink(Link):
    """One member's end of a link.

    `kind` is the kind of the half that carries frames to the peer; empty until it is known. `drained` is set once the
    peer has received everything, or will receive nothing more. `asked` is True once an operation has asked for this
    link; guarded by the mesh. A thread that waits for a half is woken by a failure, and looks by itself every
    `slice_s` seconds.
    """

    def __init__(self, peer: Peer, fault: Fault, loop: asyncio.AbstractEventLoop, *, slice_s: float = SLICE) -> None:
        self.peer = peer
        self.kind = ""
        self.stream = Outbox(loop)
        self.drained = Latch()
        self.asked = False
        self._fault = fault
        self._slice_s = slice_s
        self._out: Outgoing | None = None
        self._in: Incoming | None = None
        self._opened = Latch()  # the outgoing half is known, or there will be none
        self._arrived = Latch()  # the incoming half is there, or there will be none
        self._lock = threading.Lock()  # guards these:
        self._coming: Incoming | None = None  # the incoming half from its arrival on; `_in` once its reader may use it
        self._out_ended: LinkEnded | None = None
        self._in_ended: LinkEnded | None = None
        self._notify: Callable[[], None] = _nothing
        self._claimed = False  # touched on the loop only
        self._sending = self._receiving = self._shut = False  # a thread is inside; no thread may enter any more
        fault.on_failure(self._wake)

    # For the calling threads. They set `_sending` or `_receiving` before they read `_shut`, and `shut` does the
    # opposite. Whichever comes last closes the half.

    def send(self, frame: Frame, deadline: float) -> None:
        """See `Link.send`."""
        self._sending = True
        try:
            self._outgoing(deadline).send(frame, deadline)
        finally:
            self._done_sending()

    def lend(self, frame: Frame, deadline: float) -> None:
        """See `Link.lend`."""
        self._sending = True
        try:
            self._outgoing(deadline).lend(frame, deadline)
        finally:
            self._done_sending()

    def mark(self, number: int, deadline: float) -> bool:
        """See `Link.mark`."""
        self._sending = True
        try:
            return self._outgoing(deadline).mark(number)
        finally:
            self._done_sending()

    def await_release(self, deadline: float) -> None:
        """See `Link.await_release`."""
        self._sending = True
        try:
            if self._out is not None:  # else nothing was lent
                if self._shut:
                    raise self._error(None)
                self._out.await_release(deadline)
        finally:
            self._done_sending()

    def recall(self) -> None:
        """See `Link.recall`."""
        self._sending = True
        try:
            if self._out is not None and not self._shut:
                self._out.recall()
        finally:
            self._done_sending()

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        """See `Link.recv`."""
        self._receiving = True
        try:
            return self._incoming(deadline).recv(deadline, into)
        except ProtocolError as breach:
            raise self._broke_protocol(breach) from None
        finally:
            self._done_receiving()

    def await_mark(self, deadline: float) -> Frame | int:
        """See `Link.await_mark`."""
        self._receiving = True
        try:
            return self._incoming(deadline).await_mark(deadline)
        except ProtocolError as breach:
            raise self._broke_protocol(breach) from None
        finally:
            self._done_receiving()

    def release(self) -> None:
        """See `Link.release`. Raises `LinkEnded` once this link is shut, as the peer may have taken the payload back.

        It does not raise the generation's error, unlike other calls, because a failing operation also releases, and
        has an error of its own.
        """
        self._receiving = True
        try:
            if self._shut:
                raise LinkEnded("the link is closed", orderly=True)
            if self._in is not None:
                self._in.release()
        finally:
            self._done_receiving()

    def on_readable(self, notify: Callable[[], None]) -> None:
        """See `Link.on_readable`."""
        with self._lock:
            self._notify = notify
            half = self._coming
        if half is not None:
            half.on_readable(notify)  # this calls `notify`
        else:
            notify()

    def close(self, deadline: float) -> None:
        """See `Link.close`. Says that nothing follows, and waits until the peer confirms that it has received all."""
        self.half_close(FrameKind.LEAVE, deadline)
        self.drained.wait(max(0.0, deadline - time.monotonic()))

    def half_close(self, kind: Literal[FrameKind.CLOSE, FrameKind.LEAVE], deadline: float) -> None:
        """Says that nothing follows here, or on any link. Waits only until the kernel has what was sent."""
        out = self._out
        if out is not None and not self._shut and not self.closing:
            with suppress(LinkEnded, LinkTimeout, PacelineError):  # the peer counts frames, and detects missing ones
                out.flush(deadline)
        sent = out.frames if out is not None else 0
        self.stream.close(encode(Frame(kind, self._fault.generation, sent, 0, b"", b"")))

    def _outgoing(self, deadline: float) -> Outgoing:
        """Returns the outgoing half, once it is known; raises what `send` raises."""
        if self._out is None and not self._shut:
            self._await(self._opened, deadline, "the peer has not answered")
        out = self._out
        if out is None or self._shut or self.stream.closing:
            raise self._error(self._out_ended)
        return out

    def _incoming(self, deadline: float) -> Incoming:
        """Returns the incoming half, once it is there; raises what `recv` raises."""
        if self._in is None and not self._shut:
            self._await(self._arrived, deadline, "nothing came")
        half = self._in
        if half is None or self._shut:
            raise self._error(self._in_ended)
        return half

    def _await(self, latch: Latch, deadline: float, text: str) -> None:
        while not latch.wait(max(0.0, min(self._slice_s, deadline - time.monotonic()))):
            self._fault.check()
            if time.monotonic() >= deadline:
                raise LinkTimeout(text)

    def _error(self, ended: LinkEnded | None) -> LinkEnded:
        """Returns how this link ended. Raises the generation's error if the generation has failed."""
        self._fault.check()
        if ended is None or self._shut:
            return LinkEnded("the link is closed", orderly=True)
        return LinkEnded(str(ended), orderly=ended.orderly, unopened=ended.unopened)

    def _broke_protocol(self, breach: ProtocolError) -> PacelineError:
        text = f"{self.peer} broke the protocol: {breach}"
        self._fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL, self.peer.rank, 0, text))
        return self._fault.error()

    def _done_sending(self) -> None:
        self._sending = False
        if self._shut and self._out is not None:
            self._out.close()

    def _done_receiving(self) -> None:
        self._receiving = False
        if self._shut and self._coming is not None:
            self._coming.close()

    # For the mesh and the door; most of it on the loop.

    @property
    def closing(self) -> bool:
        """True once this side has said that nothing follows."""
        return self.stream.closing

    @property
    def opened(self) -> bool:
        """True once this side has a half that carries frames to the peer."""
        return self._out is not None

    @property
    def sent_bytes(self) -> int:
        """Bytes of operations' frames sent so far."""
        return self._out.sent_bytes if self._out is not None else 0

    def stuck_for(self, now: float) -> float:
        """See `Outgoing.stuck_for`."""
        return 0.0 if self._out is None or self._shut else self._out.stuck_for(now)

    def send_by(self, half: Outgoing) -> None:
        """Sends frames through this half from now on. Called once."""
        self._out, self.kind = half, half.kind
        with self._lock:
            ended = self._out_ended
        if ended is not None:
            half.end(ended)
        self._opened.set()
        if self._shut and not self._sending:  # it opened too late for `shut` to see it
            half.close()

    def claim(self) -> bool:
        """Claims the incoming half for one stream; False if another stream has or had it. Called on the loop only."""
        first, self._claimed = not self._claimed, True
        return first

    def receive_by(self, half: Incoming) -> None:
        """Receives frames through this half from now on. Called once."""
        with self._lock:
            self._coming, ended, notify = half, self._in_ended, self._notify
        if ended is not None:
            half.end(ended)
        if notify is not _nothing:
            half.on_readable(notify)
        self._in = half  # not earlier: two threads must not be in `on_readable` and `recv` at once
        self._arrived.set()
        notify()
        if self._shut and not self._receiving:
            half.close()

    def end_out(self, error: LinkEnded) -> None:
        """Ends sending with this error: the peer takes no more frames."""
        with self._lock:
            self._out_ended = self._out_ended or error
        self.stream.end(error)
        if self._out is not None and not self._shut:
            self._out.end(error)
        self._opened.set()

    def end_in(self, error: LinkEnded, frames: int | None = None) -> None:
        """Ends receiving: nothing follows, or nothing after `frames` frames in all (`Incoming.end`)."""
        with self._lock:
            self._in_ended = self._in_ended or error
            half, notify = self._coming, self._notify
        if half is not None:
            half.end(error, frames)
        else:
            self._arrived.set()
            notify()

    def forget(self) -> None:
        """Stops listening for the generation's failure."""
        self._fault.forget(self._wake)

    def shut(self) -> None:
        """Closes each half as soon as no thread uses it. Idempotent."""
        self._shut = True
        self._wake()
        if self._out is not None and not self._sending:
            self._out.close()
        if self._coming is not None and not self._receiving:
            self._coming.close()

    def _wake(self) -> None:
        """Makes blocked calls check the fault and `_shut`: this link cannot be used any more."""
        self._opened.set()
        self._arrived.set()
        self.drained.set()  # the peer will not drain it any more
        self.stream.wake()
        if self._out is not None:
            self._out.wake()
        if self._coming is not None:
            self._coming.wake()
        else:
            self._notify()


def _nothing() -> None:
    """The callback of a link whose reader has not registered one."""
