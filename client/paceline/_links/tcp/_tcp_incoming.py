"""The incoming half: frames over TCP sockets from one peer.

The caller's thread reads everything, and reads a payload directly into the caller's memory. So no other thread ever
writes to an array (I7). If a call gives up in the middle of a frame, the half keeps the first part in its own memory.

If the checksum of a frame is wrong, the half ends, and the call raises. The content of the caller's memory is undefined
then, as after any other end in the middle of a frame.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NoReturn

import numpy as np

from paceline._base.arrays import MAX_SIGNATURE_BYTES
from paceline._base.waits import SLICE
from paceline._links.base import LinkEnded, LinkTimeout
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameDamaged, FrameError
from paceline._links.kind import Incoming, ProtocolError
from paceline._links.tcp._tcp_sockets import SocketBell, Stream, Waker, make_bell, wait_ready
from paceline._links.tcp._tcp_wire import HEAD_BYTES, Head, checksum_of, cut, decode_head

_log = logging.getLogger("paceline.links")

_AHEAD = 4096
"""Most bytes that are read together with a header, so that a short frame takes one system call."""

_SPIN = 60e-6
"""Seconds for which a reader retries before it sleeps: about as long as it takes to wake up from sleep."""

_SHORT = 3 * _SPIN
"""Seconds below which a sleep was too short to be worthwhile, so that the reader retries the next time."""

_KEPT = 8
"""Buffers remembered in use, and free ones. Buffers that are never released are left to the garbage collector."""

_yield = getattr(os, "sched_yield", lambda: None)  # lets other threads run; Windows has no such call


class _Lane:
    """One stream, and the bytes that were read from it ahead of their use."""

    __slots__ = ("ahead", "begin", "end", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.ahead = memoryview(bytearray(_AHEAD))
        self.begin = self.end = 0


class TcpIncoming(Incoming):
    """See `Incoming`. It owns the connections, in the order of their index. The loop serves `on_readable`."""

    kind = "tcp"

    def __init__(self, streams: Sequence[Stream], loop: asyncio.AbstractEventLoop, fault: Fault, peer: str) -> None:
        self.slice_s = SLICE  # longest sleep in seconds
        self._lanes = [_Lane(stream) for stream in streams]
        self._loop = loop
        self._fault = fault
        self._peer = peer
        self._frames = 0  # frames that were read
        self._head: Head | None = None  # the header of the frame that is being read; these belong to it:
        self._signature = b""
        self._payload: memoryview | bytes = b""
        self._target: memoryview | None = None  # the payload, while part of it is missing
        self._is_callers = False  # `_target` is the caller's memory
        self._missing: list[list[int]] = []  # missing parts of the payload: lane, begin, end
        self._scratch = Scratch()
        self._wanted = self._lanes[:1]  # the lanes from which bytes are missing
        self._spin = _SPIN
        self._torn = False  # between reading and accounting; an interrupt there is fatal
        self._lock = threading.Lock()  # guards these three, for `end` and `wake`
        self._last: tuple[LinkEnded, int | None] | None = None  # how the half ends, after how many frames
        self._closed = False
        self._bell: SocketBell | None = None
        self._waker = Waker()
        self._notify: Callable[[], None] = _nothing

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        """See `Incoming.recv`."""
        self._fault.check()
        try:
            if (frame := self._advance(into)) is None and self._spin and deadline > monotonic():
                frame = self._try_again(into)
            while frame is None:
                self._wait(deadline)
                frame = self._advance(into)
        except BaseException:
            self._leave_callers()
            raise
        return frame

    def release(self) -> None:
        """See `Incoming.release`."""
        self._scratch.release(self._target)  # keeps a frame that has come in part

    def on_readable(self, notify: Callable[[], None]) -> None:
        """See `Incoming.on_readable`. The reader calls `recv` until it finds nothing, which arms the bell again."""
        self._notify = notify
        with self._lock:
            if self._bell is None and not self._closed:
                fds = [lane.stream.fd for lane in self._lanes]
                self._bell = make_bell(self._loop, fds, self._ring)
                self._bell.arm([lane.stream.fd for lane in self._wanted])
        notify()

    def wake(self) -> None:
        """See `Incoming.wake`."""
        with self._lock:
            if not self._closed:
                self._waker.set()
        self._notify()

    def end(self, error: LinkEnded, frames: int | None = None) -> None:
        """See `Incoming.end`. Only the first call counts."""
        with self._lock:
            self._last = self._last or (error, frames)
        self.wake()

    def close(self) -> None:
        """See `Incoming.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._notify = _nothing
        self._waker.close()
        if self._bell is None:
            self._close_streams()
        else:
            self._bell.close(self._close_streams)

    def _close_streams(self) -> None:
        for lane in self._lanes:
            lane.stream.close()

    def _ring(self) -> None:
        self._notify()

    def _advance(self, into: memoryview | None) -> Frame | None:
        """Reads the bytes that are there. Returns the frame once it is whole."""
        last = self._last
        if last is not None and last[1] is not None and self._frames >= last[1]:
            self._raise_end(last[0])
        if self._torn:
            self._end_with(LinkEnded(f"receiving from {self._peer} was interrupted in the middle of a frame"))
        self._torn = True
        frame = self._step(into)
        if frame is None and last is not None and last[1] is None:
            self._end_with(last[0])
        self._torn = False
        return frame

    def _step(self, into: memoryview | None) -> Frame | None:
        if self._head is None and not self._read_head(into):
            return None
        if self._missing and not self._read_payload():
            return None
        head = self._head
        assert head is not None
        if checksum_of(self._signature, self._payload) != head.checksum:
            self._damaged(f"the checksum of a frame of {head.size} bytes is wrong")
        frame = head.to_frame(self._signature, self._payload)
        self._head = self._target = None
        self._payload = b""
        self._is_callers = False
        self._frames += 1
        self._wanted = [self._lanes[self._frames % len(self._lanes)]]
        return frame

    def _read_head(self, into: memoryview | None) -> bool:
        """Reads the header and the signature of the next frame. Returns False if they are not complete yet."""
        lane = self._lanes[self._frames % len(self._lanes)]
        if lane.end - lane.begin < HEAD_BYTES and not self._read_ahead(lane, HEAD_BYTES):
            return False
        try:
            head = decode_head(lane.ahead[lane.begin : lane.begin + HEAD_BYTES])
        except FrameDamaged as error:
            self._damaged(str(error))
        except FrameError as error:
            self._breach(str(error))
        if head.generation != self._fault.generation:
            self._breach(f"a frame of generation {head.generation} came to generation {self._fault.generation}")
        length = HEAD_BYTES + head.words
        if lane.end - lane.begin < length and not self._read_ahead(lane, length):
            return False
        begin = lane.begin + length
        self._signature = bytes(lane.ahead[begin - head.words : begin]) if head.words else b""
        self._missing = []
        if head.size <= lane.end - begin and (into is None or len(into) != head.size):
            pieces = cut(head.size, len(self._lanes), self._frames)
            assert len(pieces) == 1, "what is read ahead is shorter than a piece"
            self._payload = bytes(lane.ahead[begin : begin + head.size])
            lane.begin = begin + head.size
        else:
            lane.begin = begin
            self._is_callers = into is not None and len(into) == head.size
            self._target = self._payload = (
                into if into is not None and self._is_callers else self._scratch.take(head.size)
            )
            for index, start, stop in cut(head.size, len(self._lanes), self._frames):
                self._missing.append([index, start, stop])
        self._head = head
        return True

    def _read_ahead(self, lane: _Lane, least: int) -> bool:
        """Reads a stream ahead until at least `least` bytes are there. Returns False if they are not there yet."""
        assert least <= HEAD_BYTES + MAX_SIGNATURE_BYTES <= _AHEAD
        if lane.begin:
            rest = lane.end - lane.begin
            lane.ahead[:rest] = lane.ahead[lane.begin : lane.end]
            lane.begin, lane.end = 0, rest
        while lane.end < least:
            count = self._read(lane, lane.ahead[lane.end :], between=not lane.end)
            if count < 0:
                self._wanted = [lane]
                return False
            if not count:  # it ended between two frames; the link's gRPC stream says how
                self._wanted = []
                if self._last is not None and self._last[1] is not None:
                    said = f"{self._frames} of {self._last[1]} frames"
                    self._end_with(LinkEnded(f"the connection from {self._peer} ended after {said}"))
                return False
            lane.end += count
        return True

    def _read_payload(self) -> bool:
        """Reads the missing parts of the payload. Returns False if it is not complete yet."""
        target = self._target
        assert target is not None
        wanted, missing = [], []
        for part in self._missing:
            index, begin, end = part
            lane = self._lanes[index]
            if lane.end > lane.begin:
                count = min(lane.end - lane.begin, end - begin)
                target[begin : begin + count] = lane.ahead[lane.begin : lane.begin + count]
                lane.begin += count
                part[1] = begin = begin + count
            count = 1
            while begin < end and count > 0:
                count = self._read(lane, target[begin:end])
                if count > 0:
                    part[1] = begin = begin + count
            if begin < end:
                wanted.append(lane)
                missing.append(part)
        self._wanted, self._missing = wanted, missing
        return not missing

    def _read(self, lane: _Lane, into: memoryview, *, between: bool = False) -> int:
        """Reads from a lane's stream (`Stream.read`). Only with `between` may the stream end here."""
        try:
            count = lane.stream.read(into)
        except OSError as error:
            self._end_with(LinkEnded(f"the connection from {self._peer} broke: {error}"))
        if not count and not between:
            self._end_with(LinkEnded(f"the connection from {self._peer} ended in the middle of a frame"))
        return count

    def _try_again(self, into: memoryview | None) -> Frame | None:
        """Retries for a moment instead of sleeping. How long depends on how long recent waits took."""
        until = monotonic() + self._spin
        while monotonic() < until:
            _yield()
            if (frame := self._advance(into)) is not None:
                self._spin = _SPIN
                return frame
        self._spin = self._spin / 2 if self._spin > _SPIN / 8 else 0.0
        return None

    def _wait(self, deadline: float) -> None:
        """Sleeps until bytes may have come; raises LinkTimeout and PacelineError as `Incoming.recv` does."""
        self._fault.check()
        started = monotonic()
        left = deadline - started
        if left <= 0:
            if self._bell is not None:
                self._bell.arm([lane.stream.fd for lane in self._wanted])
            raise LinkTimeout(f"nothing came from {self._peer} before the deadline")
        streams = [lane.stream for lane in self._wanted]
        reading = [stream.fd for stream in streams if not stream.turned]
        writing = [stream.fd for stream in streams if stream.turned]
        wait_ready([self._waker.fd, *reading], writing, min(self.slice_s, left))
        self._waker.clear()
        if monotonic() - started < _SHORT:
            self._spin = _SPIN

    def _leave_callers(self) -> None:
        """Moves a payload that has come in part from the caller's memory to the half's own (I7)."""
        if self._is_callers and self._target is not None:
            own = self._scratch.take(len(self._target))
            own[:] = self._target
            self._target = self._payload = own
            self._is_callers = False

    def _damaged(self, what: str) -> NoReturn:
        """Ends the half as a broken connection would, because the start of the next frame is unknown."""
        text = f"bytes from {self._peer} have changed on the way: {what}"
        _log.warning("%s; the link is closed", text)
        self._end_with(LinkEnded(text))

    def _breach(self, what: str) -> NoReturn:
        self._end_with(ProtocolError(what))

    def _end_with(self, error: LinkEnded) -> NoReturn:
        """Ends the half after the frames that were read, whatever the other side says."""
        with self._lock:
            self._last = error, self._frames
        self._raise_end(error)

    def _raise_end(self, error: LinkEnded) -> NoReturn:
        raise type(error)(str(error), orderly=error.orderly)


class Scratch:
    """The memory of one half for payloads that do not go to the caller's memory. It is reused after their release.

    Fresh memory costs more than copying into it (page faults), and most readers release each frame before the next. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._taken: deque[memoryview] = deque(maxlen=_KEPT)
        self._free: list[memoryview] = []

    def take(self, size: int) -> memoryview:
        """Returns `size` bytes with undefined content."""
        for number, buffer in enumerate(self._free):
            if size <= len(buffer) <= 2 * size:  # a short payload must not hold a long buffer
                del self._free[number]
                break
        else:
            buffer = np.empty(size, np.uint8).data
        self._taken.append(buffer)
        return buffer[:size]

    def release(self, keep: memoryview | None = None) -> None:
        """Frees all buffers except the one to keep."""
        if self._taken:
            still = [buffer for buffer in self._taken if keep is not None and buffer.obj is keep.obj]
            self._free = [
                *(buffer for buffer in self._taken if keep is None or buffer.obj is not keep.obj),
                *self._free,
            ][:_KEPT]
            self._taken = deque(still, _KEPT)


def _nothing() -> None:
    """The callback of a half whose reader has not registered one."""
