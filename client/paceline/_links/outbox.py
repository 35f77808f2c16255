"""The outbox of a link's gRPC stream: the frames that wait to be written."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque

from paceline._base.waits import SLICE
from paceline._links.base import LinkEnded, LinkTimeout
from paceline._links.fault import Fault

OUTBOX_FRAMES = 8
"""Frames that can wait to be written before `send` blocks: twice as many as a schedule sends ahead."""


class Outbox:
    """Encoded frames on their way to a link's gRPC stream. One thread fills it, and the loop empties it.

    Every link has one for the frames that end it. Frames of operations go here only if the link's kind is "grpc".
    `closing` is True once the last frame has been added.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.RLock()  # entered in C, so an interrupt cannot leave it locked, unlike a Condition
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
                    raise LinkTimeout("the peer received nothing")
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
        """Drops the waiting frames and sends this one instead, which says that the generation has failed."""
        with self._lock:
            self._frames.clear()
            self._frames.append(data)
            self.closing = True
        self._loop.call_soon_threadsafe(self._ready.set)

    def wake(self) -> None:
        """Makes a blocked `put` check the fault."""
        with self._lock:
            self._room.notify_all()

    def end(self, error: LinkEnded) -> None:
        """Makes every `put` raise from now on: the peer is gone."""
        with self._lock:
            self._ended = self._ended or error
            self._frames.clear()
            self._room.notify_all()
        self._loop.call_soon_threadsafe(self._ready.set)

    def close(self, last: bytes) -> None:
        """Adds the last frame. The writer half-closes the stream after it has written all frames."""
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
        """Returns the next frame to write; None when the outbox is closed and empty. Used on the loop only."""
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
