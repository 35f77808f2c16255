"""gRPC as a kind of link (`_links.kind`): frames on the stream that every link has. It works wherever gRPC works.

Outgoing: `send` encodes in the caller's thread (the only copy of the payload), so nothing touches the caller's array
after it returns. A coroutine on the loop (`grpc_mesh.py`) takes frames from the outbox. Incoming: the door
(`grpc_door.py`) adds frames; `recv` takes them in the caller's thread, so no other thread writes to an array (I7).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable

from paceline._base.waits import SLICE
from paceline._links.base import LinkEnded, LinkTimeout
from paceline._links.fault import Fault
from paceline._links.frame import Frame, encode
from paceline._links.kind import Incoming, Kind, LinkContext, Outgoing
from paceline._links.outbox import Outbox
from paceline.config import Config
from paceline.credentials import Credentials
from pacelinepb.v1 import peer_pb2

INBOX_BYTES = 32 << 20
"""Unread bytes from which on the stream's reader stops, so that HTTP/2 flow control holds the sender."""

EARLY_INBOX_BYTES = 4 << 20
"""The same limit before this member first reads the link. The sender's outbox holds the rest that rule 2 requires."""

FRAME_COST = 1024
"""Bytes that a frame counts in addition to its payload, so that the number of empty frames is bounded too."""


class GrpcOutgoing(Outgoing):
    """See `Outgoing`. It copies lent payloads, and has no marks."""

    kind = "grpc"
    frames = 0  # the stream keeps frames in order, and ends after the last one

    def __init__(self, stream: Outbox, fault: Fault) -> None:
        self._stream = stream
        self._fault = fault

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]  # read-only
        """Bytes sent so far, with the frames' headers."""
        return self._stream.sent_bytes

    def send(self, frame: Frame, deadline: float) -> None:
        """See `Outgoing.send`."""
        self._stream.put(encode(frame), deadline, self._fault)

    def lend(self, frame: Frame, deadline: float) -> None:
        """See `Outgoing.lend`."""
        self.send(frame, deadline)

    def await_release(self, deadline: float) -> None:
        """See `Outgoing.await_release`: nothing is lent."""

    def recall(self) -> None:
        """See `Outgoing.recall`: nothing is lent."""

    def flush(self, deadline: float) -> None:
        """See `Outgoing.flush`. Does nothing: the stream's last frame follows all others, and the peer confirms it."""

    def wake(self) -> None:
        """See `Outgoing.wake`."""
        self._stream.wake()

    def end(self, error: LinkEnded) -> None:
        """See `Outgoing.end`."""
        self._stream.end(error)

    def close(self) -> None:
        """See `Outgoing.close`. Does nothing, because the link closes the stream."""


class GrpcIncoming(Incoming):
    """See `Incoming`. The loop fills it, and one thread empties it."""

    kind = "grpc"

    def __init__(self, loop: asyncio.AbstractEventLoop, fault: Fault) -> None:
        self._loop = loop
        self._fault = fault
        self._items: queue.SimpleQueue[Frame | LinkEnded | None] = queue.SimpleQueue()
        self._ended: LinkEnded | None = None
        self._closed = False
        self._waiting_bytes = 0
        self._limit = EARLY_INBOX_BYTES
        self._lock = threading.Lock()
        self._room = asyncio.Event()  # touched on the loop only
        self._notify: Callable[[], None] = _nothing

    async def put(self, frame: Frame) -> None:
        """Adds a frame. Waits while more bytes than the limit are unread. Used on the loop only."""
        with self._lock:
            if self._closed:  # no thread will read it
                return
            self._waiting_bytes += len(frame.payload) + FRAME_COST
            full = self._waiting_bytes > self._limit
            if full:
                self._room.clear()
        self._items.put(frame)
        self._notify()
        if full:
            await self._room.wait()

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        """See `Incoming.recv`. The payload is a view of the message that the stream received."""
        if self._limit < INBOX_BYTES:
            self._widen()
        while True:
            if self._fault.failed:
                raise self._fault.error()
            if self._ended is not None:
                raise LinkEnded(str(self._ended), orderly=self._ended.orderly)
            left = deadline - time.monotonic()
            try:
                item = self._items.get(timeout=max(0.0, min(SLICE, left)))
            except queue.Empty:
                if left > SLICE:
                    continue
                raise LinkTimeout("nothing came") from None
            if isinstance(item, Frame):
                self._took(len(item.payload) + FRAME_COST)
                return item
            if item is not None:
                self._ended = item

    def release(self) -> None:
        """See `Incoming.release`. Does nothing, because each payload has memory of its own."""

    def on_readable(self, notify: Callable[[], None]) -> None:
        """See `Incoming.on_readable`."""
        self._notify = notify
        notify()

    def wake(self) -> None:
        """See `Incoming.wake`."""
        self._items.put(None)
        self._notify()

    def end(self, error: LinkEnded, frames: int | None = None) -> None:
        """See `Incoming.end`. All earlier frames are in the queue already."""
        self._items.put(error)
        self._notify()

    def close(self) -> None:
        """See `Incoming.close`. Frames that still arrive are dropped."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._room.set)

    def _widen(self) -> None:
        """Lets up to INBOX_BYTES wait from now on, because this member reads the link."""
        with self._lock:
            self._limit = INBOX_BYTES
        self._loop.call_soon_threadsafe(self._room.set)

    def _took(self, size: int) -> None:
        with self._lock:
            was_full = self._waiting_bytes > self._limit
            self._waiting_bytes -= size
            resume = was_full and self._waiting_bytes <= self._limit
        if resume:
            self._loop.call_soon_threadsafe(self._room.set)


class GrpcKind(Kind):
    """See `Kind`. Every worker has this kind. It needs no port of its own, and two members can always use it."""

    name = "grpc"
    number = peer_pb2.LINK_KIND_GRPC
    preference = 10

    def __init__(self, config: Config, credentials: Credentials) -> None:
        pass

    def offer(self, context: LinkContext, hello: peer_pb2.HelloRequest) -> bool:
        """See `Kind.offer`."""
        return True

    def expect(
        self,
        hello: peer_pb2.HelloRequest,
        context: LinkContext,
        ticket: bytes,
        on_open: Callable[[Incoming], None],
    ) -> peer_pb2.HelloResponse:
        """See `Kind.expect`. The stream fills the half, so there is nothing more to open."""
        on_open(GrpcIncoming(asyncio.get_running_loop(), context.fault))
        return peer_pb2.HelloResponse()

    async def open(
        self, answer: peer_pb2.HelloResponse, context: LinkContext, stream: Outbox, timeout: float
    ) -> Outgoing:
        """See `Kind.open`."""
        return GrpcOutgoing(stream, context.fault)


def _nothing() -> None:
    """The callback of a half whose reader has not registered one."""
