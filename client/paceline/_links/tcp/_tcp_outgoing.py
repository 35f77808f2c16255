"""The outgoing half: frames over TCP sockets to one peer.

The caller's thread writes as long as the kernel takes everything. Bytes that the kernel does not take wait here. They
are copied, unless they were lent. The half's own thread writes them; it starts when it is first needed. Only one of the
two threads writes at a time: the caller's while nothing waits, the half's own while something waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from time import monotonic

from paceline._base.addresses import is_exhausted
from paceline._base.waits import SLICE
from paceline._links.base import LinkEnded, LinkTimeout
from paceline._links.fault import Fault
from paceline._links.frame import Frame
from paceline._links.kind import Outgoing
from paceline._links.tcp._tcp_sockets import Stream, Waker, wait_ready
from paceline._links.tcp._tcp_wire import cut, encode_head

MAX_WAITING_FRAMES = 8
"""Frames that can wait for the kernel before `send` blocks: twice as many as a schedule sends ahead."""

MAX_WAITING_BYTES = 8 << 20
"""The same in bytes of payload: as many as a schedule sends ahead. One frame may always wait."""

_GATHER = 16
"""Buffers that one system call writes."""


class _Late:
    """A frame with bytes that wait."""

    __slots__ = ("lent", "pieces", "size")

    def __init__(self, size: int, lent: bool) -> None:
        self.pieces = 0
        self.size = size
        self.lent = lent


class TcpOutgoing(Outgoing):
    """See `Outgoing`. It owns the connections, in the order of their index."""

    kind = "tcp"

    def __init__(self, streams: Sequence[Stream], fault: Fault, peer: str) -> None:
        self.frames = 0
        self.sent_bytes = 0
        self.slice_s = SLICE  # longest sleep in seconds
        self._streams = tuple(streams)
        self._fault = fault
        self._peer = peer
        self._lock = threading.RLock()  # entered in C, so an interrupt cannot leave it locked, unlike a Condition
        self._changed = threading.Condition(self._lock)  # guards these, and is notified of every change:
        self._queues: list[deque[tuple[memoryview, _Late | None]]] = [deque() for _ in streams]
        self._waiting = 0  # frames with bytes in the queues; while 0, the thread touches no socket
        self._waiting_bytes = 0
        self._lent = 0  # waiting frames that are lent
        self._writing = False  # the thread is in a system call that reads waiting bytes
        self._polled: frozenset[int] = frozenset()  # the streams whose readiness the thread is waiting for
        self._ended: LinkEnded | None = None
        self._thread: threading.Thread | None = None
        self._waker: Waker | None = Waker()  # made now, because it may fail
        self._torn = False  # the caller's thread is between writing and accounting; an interrupt there is fatal

    def send(self, frame: Frame, deadline: float) -> None:
        """See `Outgoing.send`."""
        self._put(frame, deadline, lent=False)

    def lend(self, frame: Frame, deadline: float) -> None:
        """See `Outgoing.lend`."""
        self._put(frame, deadline, lent=True)

    def await_release(self, deadline: float) -> None:
        """See `Outgoing.await_release`. Waits until the kernel has all lent payloads."""
        if self._lent:
            self._wait(lambda: not self._lent, deadline)

    def flush(self, deadline: float) -> None:
        """See `Outgoing.flush`."""
        if self._waiting:
            self._wait(lambda: not self._waiting, deadline)

    def recall(self) -> None:
        """See `Outgoing.recall`. A frame that is cut off in the middle ends the connection."""
        if not self._waiting and not self._torn:  # the kernel has everything; no thread reads the caller's memory
            return
        self._stop(LinkEnded(f"the frames on their way to {self._peer} were taken back"))
        for stream in self._streams:
            stream.shut()

    def stuck_for(self, now: float) -> float:
        """See `Outgoing.stuck_for`. Returns the longest time of all connections."""
        return max(stream.stuck_for(now) for stream in self._streams)

    def wake(self) -> None:
        """See `Outgoing.wake`."""
        with self._lock:
            self._changed.notify_all()

    def end(self, error: LinkEnded) -> None:
        """See `Outgoing.end`."""
        with self._lock:
            self._ended = self._ended or error
            self._changed.notify_all()
            if self._waker is not None:
                self._waker.set()

    def close(self) -> None:
        """See `Outgoing.close`."""
        self._stop(LinkEnded("the link is closed", orderly=True))
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            waker, self._waker = self._waker, None
        if waker is not None:
            waker.close()
        for stream in self._streams:
            stream.close()

    def _put(self, frame: Frame, deadline: float, *, lent: bool) -> None:
        self._fault.check()
        if self._ended is not None:
            raise self._error()
        head, payload = encode_head(frame), frame.payload
        size = len(payload)
        if self._waiting:
            self._wait(lambda: self._has_room(size), deadline)
        if self._torn:
            self.end(LinkEnded(f"sending to {self._peer} was interrupted in the middle of a frame"))
            raise self._error()
        self._torn = True
        pieces = cut(size, len(self._streams), self.frames)
        direct = not self._waiting
        rests: list[tuple[int, list[bytes | memoryview]]] = []
        whole = memoryview(payload) if len(pieces) > 1 else payload
        for number, (index, begin, end) in enumerate(pieces):
            buffers: list[bytes | memoryview] = [] if number else [head]
            if end > begin:
                buffers.append(whole if end - begin == size else whole[begin:end])
            if direct:
                length = end - begin + (0 if number else len(head))
                count = self._write(self._streams[index], buffers)
                if count == length:
                    continue
                buffers = _after(buffers, count)
            rests.append((index, buffers))
        if rests:
            self._enqueue(rests, size, lent=lent)
        self.frames += 1
        self.sent_bytes += size
        self._torn = False

    def _write(self, stream: Stream, buffers: Sequence[bytes | memoryview]) -> int:
        try:
            return stream.write(buffers)
        except OSError as error:
            self.end(LinkEnded(f"the connection to {self._peer} broke: {error}"))
            raise self._error() from error

    def _enqueue(self, rests: list[tuple[int, list[bytes | memoryview]]], size: int, *, lent: bool) -> None:
        """Leaves the rest of a frame to the half's thread."""
        late = _Late(size, lent)
        if not lent:
            rests = [(index, [b"".join(buffers)]) for index, buffers in rests]
        with self._lock:
            if self._ended is not None:  # the thread has found a broken connection meanwhile
                return
            for index, buffers in rests:
                late.pieces += 1
                self._queues[index].extend((memoryview(buffer), None) for buffer in buffers[:-1])
                self._queues[index].append((memoryview(buffers[-1]), late))
            self._waiting += 1
            self._waiting_bytes += size
            self._lent += lent
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline-tcp", daemon=True)
                self._thread.start()
            elif not self._polled:
                self._changed.notify_all()
            elif self._waker is not None and not self._polled.issuperset(index for index, _ in rests):
                self._waker.set()

    def _has_room(self, size: int) -> bool:
        return not self._waiting or (
            self._waiting < MAX_WAITING_FRAMES and self._waiting_bytes + size <= MAX_WAITING_BYTES
        )

    def _wait(self, done: Callable[[], bool], deadline: float) -> None:
        """Waits until `done()` is true; raises LinkTimeout, LinkEnded and PacelineError as `Outgoing` says."""
        with self._lock:
            while not done() and self._ended is None and not self._fault.failed:
                left = deadline - monotonic()
                if left <= 0:
                    raise LinkTimeout(f"{self._peer} received nothing before the deadline")
                self._changed.wait(min(self.slice_s, left))
            if done() and self._ended is None and not self._fault.failed:
                return
        self._fault.check()  # not under the lock: it may wait for a verdict
        raise self._error()

    def _error(self) -> LinkEnded:
        assert self._ended is not None
        return LinkEnded(str(self._ended), orderly=self._ended.orderly)

    def _stop(self, error: LinkEnded) -> None:
        """Drops the waiting bytes, and returns when the thread reads none of them any more."""
        self.end(error)
        with self._lock:
            while self._writing:  # not for long: the thread makes no blocking calls
                self._changed.wait()
            for queue in self._queues:
                queue.clear()
            self._waiting = self._waiting_bytes = self._lent = 0

    def _run(self) -> None:
        """Runs the half's thread: writes waiting bytes, and reports any failure."""
        try:
            self._write_all()
        except BaseException as error:  # noqa: BLE001  most likely out of memory; the training thread raises it
            self._broke(error)

    def _write_all(self) -> None:
        while (indexes := self._next()) is not None:
            moved = False
            for index in indexes:
                moved = self._write_some(index) or moved
            if not moved:
                self._poll(indexes)

    def _broke(self, error: BaseException) -> None:
        """Reports this member's own failure, before the link ends and the peer is blamed for that."""
        try:
            self._fault.broke(error)
        finally:
            with self._lock:
                self._writing = False
                self.end(LinkEnded(f"this member cannot write to {self._peer}: {error!r}"))

    def _write_some(self, index: int) -> bool:
        """Writes a stream's waiting bytes as far as the kernel takes them. Returns False if it takes none."""
        with self._lock:
            if self._ended is not None:
                return False
            buffers = [view for view, _ in islice(self._queues[index], _GATHER)]
            self._writing = True
        count = 0
        error: LinkEnded | None = None
        try:
            count = self._streams[index].write(buffers)
        except Exception as broken:  # any error: the half must end
            if is_exhausted(broken):
                raise
            error = LinkEnded(f"the connection to {self._peer} broke: {broken}")
        with self._lock:
            self._writing = False
            waiting = self._waiting
            self._account(index, count)
            if self._waiting < waiting or self._ended is not None:
                self._changed.notify_all()
            if error is not None:
                self.end(error)
        return count > 0

    def _next(self) -> list[int] | None:
        """Waits until bytes wait, and returns their streams; None when the half has ended."""
        with self._lock:
            while not self._waiting and self._ended is None:
                self._changed.wait()
            if self._ended is not None:
                return None
            return self._pending()

    def _pending(self) -> list[int]:
        return [index for index, queue in enumerate(self._queues) if queue]

    def _account(self, index: int, count: int) -> None:
        """Removes `count` bytes from a queue, because the kernel has them."""
        queue = self._queues[index]
        while count:
            view, late = queue[0]
            if count < len(view):
                queue[0] = view[count:], late
                return
            count -= len(view)
            queue.popleft()
            if late is not None:
                late.pieces -= 1
                if not late.pieces:
                    self._waiting -= 1
                    self._waiting_bytes -= late.size
                    self._lent -= late.lent

    def _poll(self, indexes: list[int]) -> None:
        """Waits until the kernel can take bytes, or another thread sets the waker."""
        with self._lock:
            if self._ended is not None or self._waker is None or indexes != self._pending():
                return
            waker = self._waker
            self._polled = frozenset(indexes)
        streams = [self._streams[index] for index in indexes]
        reading = [stream.fd for stream in streams if stream.turned]
        wait_ready([waker.fd, *reading], [stream.fd for stream in streams if not stream.turned], self.slice_s)
        with self._lock:
            self._polled = frozenset()
        waker.clear()


def _after(buffers: list[bytes | memoryview], count: int) -> list[bytes | memoryview]:
    """Returns the buffers without their first `count` bytes."""
    rest: list[bytes | memoryview] = []
    for buffer in buffers:
        if count >= len(buffer):
            count -= len(buffer)
        else:
            rest.append(memoryview(buffer)[count:] if count else buffer)
            count = 0
    return rest
