"""The queues of a gRPC stream: between the calling threads and the loop thread.

Outgoing: `send` encodes in the caller's thread (the one copy of the payload), so nothing touches the caller's array
once it returns; a coroutine on the loop (`grpc_dial.py`) takes frames from the outbox. Incoming: the front door
(`grpc_door.py`) fills the inbox; `recv` empties it in the caller's thread, so no other ever writes to an array (I7).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from paceline._wait import SLICE
from paceline.links.base import LinkEnded, LinkTimeout
from paceline.links.fault import Fault
from paceline.links.frame import Frame
from paceline.links.halves import Incoming

__all__ = ["EARLY_INBOX_BYTES", "INBOX_BYTES", "OUTBOX_FRAMES", "Inbox", "Outbox"]

INBOX_BYTES = 32 << 20
"""Bytes that wait unread before the reader stops and HTTP/2 flow control holds the sender."""

EARLY_INBOX_BYTES = 4 << 20
"""The same, for a link that this member has not used yet; the writer holds the rest of what every link must."""

FRAME_COST = 1024
"""Bytes that a frame counts on top of its payload, so that empty ones are bounded too."""

OUTBOX_FRAMES = 8
"""Frames that wait to be written before `send` blocks: twice what a schedule runs ahead."""


class Outbox:
    """Encoded frames on their way out: filled by one thread, emptied on the loop.

    Attributes:
        closing: True once the last frame has been added.
        sent_bytes: bytes that were added so far.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.RLock()  # entered in C: an interrupt cannot leave it taken, as it can a Condition
        self._room = threading.Condition(self._lock)
        self._frames: deque[bytes] = deque()
        self._ended: LinkEnded | None = None
        self.closing = False
        self._ready = asyncio.Event()  # touched on the loop only
        self.sent_bytes = 0

    def put(self, data: bytes, deadline: float, fault: Fault) -> None:
        """Adds a frame, waiting for room until the deadline."""
        with self._lock:
            while len(self._frames) >= OUTBOX_FRAMES and self._ended is None and not fault.failed:
                left = deadline - time.monotonic()
                if not self._room.wait(min(SLICE, left)) and left <= SLICE:
                    raise LinkTimeout("the peer took nothing")
            accepted = self._ended is None and not self.closing and not fault.failed
            if accepted:
                self._frames.append(data)
                self.sent_bytes += len(data)
            wake = accepted and len(self._frames) == 1
        if wake:
            self._loop.call_soon_threadsafe(self._ready.set)
        if not accepted:
            fault.check()  # not under the lock: it may wait for a verdict, which comes through the loop
            raise self._ended or LinkEnded("the link is closed", orderly=True)

    def put_last(self, data: bytes) -> None:
        """Drops what waits and sends this frame instead: the news that the generation has failed."""
        with self._lock:
            self._frames.clear()
            self._frames.append(data)
            self.closing = True
        self._loop.call_soon_threadsafe(self._ready.set)

    def wake(self) -> None:
        """Makes a blocked `put` look at the fault again."""
        with self._lock:
            self._room.notify_all()

    def end(self, error: LinkEnded) -> None:
        """The peer is gone: every `put` raises from now on."""
        with self._lock:
            self._ended = self._ended or error
            self._frames.clear()
            self._room.notify_all()
        self._loop.call_soon_threadsafe(self._ready.set)

    def close(self, last: bytes) -> None:
        """No more frames after this one; the writer half-closes the stream when it has written what is here."""
        with self._lock:
            if not self.closing:
                self.closing = True
                self._frames.append(last)
        self._loop.call_soon_threadsafe(self._ready.set)

    def wait_empty(self, deadline: float) -> None:
        """Waits until the writer has taken all frames, or until the deadline."""
        with self._lock:
            while self._frames and self._ended is None and self._room.wait(max(0.0, deadline - time.monotonic())):
                pass

    async def take(self) -> bytes | None:
        """The next frame to write; None when the outbox is closed and empty. On the loop only."""
        while True:
            with self._lock:
                if self._frames:
                    data = self._frames.popleft()
                    self._room.notify()
                    return data
                if self.closing or self._ended is not None:
                    return None
                self._ready.clear()
            await self._ready.wait()


class Inbox:
    """Frames that have arrived: filled on the loop, emptied by one thread.

    If the peer has opened a faster way in (`turn_to`), frames come by that one instead.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: queue.SimpleQueue[Frame | LinkEnded | Incoming | None] = queue.SimpleQueue()
        self._half: Incoming | None = None  # the way in, once the reader has come to it
        self._coming: Incoming | None = None  # the same, from its arrival on
        self._ended: LinkEnded | None = None
        self._closed = False
        self._claimed = False  # touched on the loop only
        self._waiting_bytes = 0
        self._limit = EARLY_INBOX_BYTES
        self._lock = threading.Lock()
        self._room = asyncio.Event()  # touched on the loop only
        self._on_item: Callable[[], None] = _nothing

    def claim(self) -> bool:
        """Takes it for the one stream that fills it; False if there is one already, or was. On the loop only."""
        first, self._claimed = not self._claimed, True
        return first

    async def put(self, frame: Frame) -> None:
        """Adds a frame; waits while more than the limit wait unread. On the loop only."""
        with self._lock:
            self._waiting_bytes += len(frame.payload) + FRAME_COST
            full = self._waiting_bytes > self._limit
            if full:
                self._room.clear()
        self._items.put(frame)
        self._on_item()
        if full:
            await self._room.wait()

    def widen(self) -> None:
        """This member uses the link now: up to INBOX_BYTES may wait."""
        with self._lock:
            self._limit = INBOX_BYTES
        self._loop.call_soon_threadsafe(self._room.set)

    def turn_to(self, half: Incoming) -> None:
        """From now on frames come this way. On the loop only."""
        with self._lock:
            closed = self._closed
            self._coming = None if closed else half
            notify = self._on_item
        if closed:
            half.close()
            return
        if notify is not _nothing:
            half.on_readable(notify)
        self._items.put(half)
        notify()

    def on_readable(self, notify: Callable[[], None]) -> None:
        """See `Link.on_readable`."""
        with self._lock:
            self._on_item = notify
            half = self._coming
        if half is not None:
            half.on_readable(notify)
        notify()

    def end(self, error: LinkEnded, frames: int | None = None) -> None:
        """Nothing follows; on another way in, nothing after so many frames in all (`Incoming.end`)."""
        if self._coming is not None:
            self._coming.end(error, frames)
        self._items.put(error)
        self._on_item()

    def wake(self) -> None:
        """Makes a blocked `get` look at the fault."""
        if self._coming is not None:
            self._coming.wake()
        self._items.put(None)
        self._on_item()

    def release(self) -> None:
        """See `Link.release`."""
        if self._half is not None:
            self._half.release()

    def close(self) -> None:
        """Gives back what the other way in takes, one that comes later too. Nobody is inside, or comes again."""
        with self._lock:
            self._closed = True
            half = self._coming
        if half is not None:
            half.close()

    def get(self, deadline: float, fault: Fault, into: memoryview | None = None) -> Frame:
        """The next frame, see `Link.recv`."""
        half = self._half
        if half is not None:
            return half.recv(deadline, into)
        frame = self._next(deadline, fault)
        return self.get(deadline, fault, into) if frame is None else frame

    def await_mark(self, deadline: float, fault: Fault) -> Frame | int:
        """See `Link.await_mark`; in place of a mark, frames come by gRPC."""
        half = self._half
        if half is not None:
            return half.await_mark(deadline)
        frame = self._next(deadline, fault)
        return self.await_mark(deadline, fault) if frame is None else frame

    def _next(self, deadline: float, fault: Fault) -> Frame | None:
        """The next frame by gRPC; None once they come another way."""
        while True:
            if fault.failed:
                raise fault.error()
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
            if isinstance(item, Incoming):
                self._half = item
                return None
            if item is not None:
                self._ended = item

    def _took(self, size: int) -> None:
        with self._lock:
            was_full = self._waiting_bytes > self._limit
            self._waiting_bytes -= size
            resume = was_full and self._waiting_bytes <= self._limit
        if resume:
            self._loop.call_soon_threadsafe(self._room.set)


def _nothing() -> None:
    """Stands where no reader asked to be told of arrivals."""
