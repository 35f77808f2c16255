"""The reader's half: it reads counts from the bell, and frames from memory that the peer writes.

The peer can change that memory at any time, so each field is read once, checked, and then used (I9). Small payloads are
copied out. Larger payloads are read in place until `release`. A reader that has never released anything gets copies,
because it would soon hold all of the memory.
"""

from __future__ import annotations

import array
import asyncio
import os
import select
import socket
import threading
from collections.abc import Callable
from time import monotonic

import numpy as np

from paceline._base.arrays import MAX_SIGNATURE_BYTES, copy_bytes
from paceline._base.processes import check_process
from paceline._links.base import MARKS, LinkEnded, LinkTimeout, Peer
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline._links.kind import Incoming
from paceline._links.shm.bell import AWAKE, Bell, SpinPolicy, awake_for
from paceline._links.shm.control_segment import (
    INLINE_BYTES,
    MARK,
    MAX_PAYLOAD_BYTES,
    SLOTS,
    STAGING_AT,
    STAGING_BYTES,
    ControlMemory,
    Descriptor,
    PayloadPlace,
)
from paceline._links.shm.outgoing import ANNOUNCEMENT, again, breach
from paceline._links.shm.segment import Attached, SegmentError, attach
from paceline.errors import LimitExceeded

MAX_SEGMENTS = 4096
"""Most segments of one peer that are mapped at a time."""

_FRAMES, _MARKS = range(2)
"""Indices of `ShmIncoming._rung`. The bell counts frames and marks."""


class ShmIncoming(Incoming):
    """Frames from one peer of this host. `handover.ShmHost` makes it.

    It owns socket and eventfds, which do not block: `bell` counts frames and marks, `room` counts released frames.
    `neighbours` are other members on this machine, which share its cores.
    """

    kind = "shm"

    def __init__(
        self,
        fault: Fault,
        peer: Peer,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        control: Attached,
        bell: int,
        room: int,
        neighbours: int = 1,
    ) -> None:
        self._bell = Bell(bell, 0.0)  # first, because it may fail; never spins: this half spins on memory
        self._fault = fault
        self._peer = peer
        self._loop = loop
        self._segments = LentSegments(fault, peer, sock)
        self._attached = control
        self._control = ControlMemory(control.view)
        self._told, self._marks = self._control.told, self._control.marks
        self._marked = 0  # marks that were read
        self._seen = [0] * MARKS  # the value last read at each place
        self._room = room
        self._bell.watch(sock.fileno(), self._on_socket)
        self._spinning, self._mark_spinning = SpinPolicy(awake_for(neighbours)), SpinPolicy(AWAKE)
        self._rung = [0, 0]  # frames and marks that the bell has counted, and the reader has not read
        self._frames = 0  # frames that were read
        self._held = 0  # frames that were read and not given back
        self._pinned = False  # a held frame is read in place
        self._lent = False  # a held frame lies in the peer's arena
        self._releases = False  # the reader has released a frame before, so it will again
        self._ended: tuple[LinkEnded, int | None] | None = None
        self._notify: Callable[[], None] = _nothing
        self._epoll: select.epoll | None = None
        self._lock = threading.Lock()
        self._closed = False

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        """See `Incoming.recv`. Large payloads are views of the peer's memory, unless they are copied to `into`."""
        check_process()
        if self._fault.failed:
            self._fault.check()
        if not self._rung[_FRAMES]:
            self._await(_FRAMES, self._told, 0, self._frames, self._spinning, deadline)
        number, control = self._frames, self._control
        found = control.descriptor(number)
        if (
            found.number != number
            or found.kind != FrameKind.DATA
            or found.generation != self._fault.generation
            or found.signature_bytes > MAX_SIGNATURE_BYTES
            or found.size > MAX_PAYLOAD_BYTES
        ):
            text = f"frame {found.number} of kind={found.kind} and generation={found.generation}"
            text += f", {found.signature_bytes} + {found.size} bytes"
            breach(self._fault, self._peer, f"{text}, where frame {number} was due")
        signature, size, in_place = control.signature(number, found.signature_bytes), found.size, True
        payload: bytes | memoryview
        if found.place == PayloadPlace.SLOT:
            if size > INLINE_BYTES:
                breach(self._fault, self._peer, f"{size} bytes in a slot of {INLINE_BYTES}")
            payload, in_place = bytes(control.inline(number, size)), False
        else:
            payload = self._locate(found)
        if into is not None and len(into) == size:
            copy_bytes(payload, into)
            payload = into
        elif in_place and self._releases:
            self._pinned = True
        elif in_place:
            payload = np.frombuffer(payload, np.uint8).copy().data
        self._rung[_FRAMES] -= 1
        self._frames += 1
        self._held += 1
        self._lent |= found.place == PayloadPlace.ARENA
        if not self._pinned:
            self._give_back()
        return Frame(FrameKind.DATA, found.generation, found.operation, found.part, signature, payload)

    def await_mark(self, deadline: float) -> Frame | int:
        """See `Incoming.await_mark`."""
        check_process()
        if self._fault.failed:
            self._fault.check()
        at = self._marked % MARKS
        if not self._rung[_MARKS]:
            self._await(_MARKS, self._marks, at, self._seen[at], self._mark_spinning, deadline)
        if self._rung[_FRAMES] and (not self._rung[_MARKS] or self._next_operation() < self._marks[at]):
            return self.recv(deadline)
        self._rung[_MARKS] -= 1
        self._marked += 1
        found = self._seen[at] = self._marks[at]
        return found

    def _next_operation(self) -> int:
        """Returns the operation of the next frame, which the bell has counted."""
        return self._control.descriptor(self._frames).operation

    def _await(self, what: int, words: memoryview, at: int, before: int, spinning: SpinPolicy, deadline: float) -> None:
        """Waits until the bell has counted a frame or a mark (`what`, see `_rung`). For a mark, a frame ends it too.

        When `words[at]`, in the peer's memory, differs from `before`, the bell is about to ring. This method spins on
        that word for as long as `spinning` allows, yields the core in between, and then sleeps.
        """
        rung, started = self._rung, 0.0
        if words[at] == before:
            started, pause = monotonic(), os.sched_yield
            if spinning.should_spin:
                until = min(deadline, started + spinning.most)
                while words[at] == before and monotonic() < until:
                    pause()
        if words[at] != before:
            self._count(self._bell.read())
        while not rung[what] and not (what == _MARKS and rung[_FRAMES]):
            self._sleep(deadline)
        if started:
            spinning.note(monotonic() - started)

    def _count(self, count: int) -> None:
        rung = self._rung
        rung[_FRAMES] += count % MARK
        rung[_MARKS] += count // MARK
        if rung[_FRAMES] > SLOTS - self._held or rung[_MARKS] > MARKS:
            text = "it rang for {} frames and {} marks".format(*rung)
            breach(self._fault, self._peer, f"{text}, where {SLOTS - self._held} frames fit")

    def release(self) -> None:
        """See `Incoming.release`."""
        self._releases = True
        if self._pinned:
            self._give_back()

    def _give_back(self) -> None:
        held, lent = self._held, self._lent
        self._held, self._lent, self._pinned = 0, False, False
        if lent:
            self._check_void()
        try:
            os.eventfd_write(self._room, held)
        except BlockingIOError:
            breach(self._fault, self._peer, "its counter of released frames overflowed")

    def on_readable(self, notify: Callable[[], None]) -> None:
        """See `Incoming.on_readable`."""
        with self._lock:  # after `close` the bell's descriptor may be another file's
            if not self._closed:
                self._notify = notify
                if self._epoll is None:
                    self._watch()
        notify()

    def _watch(self) -> None:
        # Each ring makes the edge-triggered epoll readable, whether the count has been read or not.
        try:
            self._epoll = select.epoll()
        except OSError as error:
            raise LimitExceeded(f"cannot wait for frames from {self._peer}: {error}") from error
        self._epoll.register(self._bell.fd, select.EPOLLIN | select.EPOLLET)
        self._loop.call_soon_threadsafe(self._listen, self._epoll)

    def wake(self) -> None:
        """See `Incoming.wake`."""
        self._bell.wake()
        self._notify()

    def end(self, error: LinkEnded, frames: int | None = None) -> None:
        """See `Incoming.end`."""
        if self._ended is None:
            self._ended = (error, frames)
        self._bell.wake()
        self._notify()

    def close(self) -> None:
        """See `Incoming.close`. Payloads that are still referenced keep their memory."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ended = (LinkEnded(f"the link from {self._peer} was closed here", orderly=True), None)
        self._rung, self._pinned, self._notify = [0, 0], False, _nothing
        self._bell.close()
        os.close(self._room)
        self._segments.close()
        del self._attached, self._control
        # Later calls find nothing new, and then the end.
        self._told = memoryview(array.array("Q", [self._frames]))
        self._marks = memoryview(array.array("Q", self._seen))
        if self._epoll is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._unlisten, self._epoll)

    def _sleep(self, deadline: float) -> None:
        """Waits for the bell, for at most a slice of time. Raises if the link or the deadline has ended."""
        if self._fault.failed:  # before it sleeps, because another read may have used up the wake
            self._fault.check()
        ended = self._ended  # read before the bell, so that no ring before the end is missed
        count = self._bell.take(deadline if ended is None else 0.0)
        if count:
            self._count(count)
            return
        self._fault.check()
        if ended is not None:
            self._raise_end(*ended)
        if monotonic() >= deadline:
            raise LinkTimeout(f"nothing came from {self._peer}")

    def _raise_end(self, error: LinkEnded, frames: int | None) -> None:
        if frames is not None and frames != self._frames:
            # The peer rang its bell before it said that, so no other frame is in transit.
            breach(self._fault, self._peer, f"it said that it had sent {frames} frames, but had sent {self._frames}")
        raise again(error)

    def _locate(self, found: Descriptor) -> memoryview:
        """Returns the peer's memory that a descriptor names. Ends the generation if the descriptor is invalid."""
        offset, size = found.offset, found.size
        if found.place == PayloadPlace.STAGING:
            if not STAGING_AT <= offset <= STAGING_AT + STAGING_BYTES - size:
                breach(self._fault, self._peer, f"{size} bytes at {offset}, outside of staging")
            return self._control.staged(offset, size)
        if found.place != PayloadPlace.ARENA:
            breach(self._fault, self._peer, f"a payload in place {found.place}")
        if self._control.is_void:
            raise self._void()
        segment = self._segments.find(found.segment)
        if offset > segment.size - size:
            breach(self._fault, self._peer, f"{size} bytes at {offset} in a segment of {segment.size}")
        return segment.view[offset : offset + size]

    def _check_void(self) -> None:
        with self._lock:  # twice, as a full barrier: the payload is read before the void flag
            pass
        with self._lock:
            pass
        if self._control.is_void:
            raise self._void()

    def _void(self) -> LinkEnded:
        return LinkEnded(f"{self._peer} took back the arrays that it had lent: its operation failed")

    def _on_socket(self, events: int) -> None:
        if events & (select.POLLHUP | select.POLLERR):
            self._bell.forget(self._segments.fileno())  # the link's stream says how the link ended
        self._segments.learn()

    def _listen(self, epoll: select.epoll) -> None:
        self._loop.add_reader(epoll.fileno(), self._on_edge, epoll)

    def _unlisten(self, epoll: select.epoll) -> None:
        self._loop.remove_reader(epoll.fileno())
        epoll.close()

    def _on_edge(self, epoll: select.epoll) -> None:
        epoll.poll(0)
        self._notify()


def _nothing() -> None:
    """The callback of a half whose reader has not registered one."""


class LentSegments:
    """The segments of its arena that a peer has handed over, mapped read-only. Used by the thread that reads.

    It owns the socket from the peer, which does not block.
    """

    def __init__(self, fault: Fault, peer: Peer, sock: socket.socket) -> None:
        self._fault = fault
        self._peer = peer
        self._sock = sock
        self._segments: dict[int, Attached] = {}

    def fileno(self) -> int:
        """Returns the socket's descriptor, which is readable when the peer has announced something."""
        return self._sock.fileno()

    def find(self, number: int) -> Attached:
        """Returns the segment with this number. Ends the generation if the peer has not handed it over."""
        segment = self._segments.get(number)
        if segment is None:
            self.learn()
            segment = self._segments.get(number)
            if segment is None:
                breach(self._fault, self._peer, f"a payload in segment {number}, which it has not handed over")
        return segment

    def close(self) -> None:
        """Closes the socket. Segments that are still referenced stay mapped."""
        self._sock.close()
        self._segments.clear()

    def learn(self) -> None:
        """Reads which segments the peer has handed over, and which are gone."""
        for _ in range(MAX_SEGMENTS):  # bounded: a flood of announcements must not delay a reader past its deadline
            try:
                word, descriptors = receive_descriptors(self._sock, ANNOUNCEMENT.size, 1)
            except (BlockingIOError, ConnectionError):  # no more; or it hung up, which the link's stream reports
                return
            if not word:
                return
            try:
                self._announced(word, descriptors)
            finally:
                for fd in descriptors:
                    os.close(fd)

    def _announced(self, word: bytes, descriptors: list[int]) -> None:
        if len(word) != ANNOUNCEMENT.size:
            breach(self._fault, self._peer, f"an announcement of {len(word)} bytes")
        number, size = ANNOUNCEMENT.unpack(word)
        if not size:
            self._segments.pop(number, None)
            return
        if not descriptors:  # the kernel drops descriptors for which the table has no room
            raise LimitExceeded(f"this process has no file descriptor left for the memory of {self._peer}")
        if len(self._segments) >= MAX_SEGMENTS or number in self._segments:
            breach(self._fault, self._peer, f"segment {number} twice, or more than {MAX_SEGMENTS} segments")
        try:
            self._segments[number] = attach(descriptors[0], size)
        except SegmentError as error:
            breach(self._fault, self._peer, f"segment {number}: {error}")
        except OSError as error:
            raise LimitExceeded(f"cannot map the memory of {self._peer}: {error}") from error


def receive_descriptors(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receives one message and its descriptors. A message longer than `size` is cut to `size` + 1 bytes.

    The socket preserves message boundaries, and does not block. Descriptors beyond `most` are closed.
    """
    data, ancillary, _, _ = sock.recvmsg(size + 1, socket.CMSG_SPACE(4 * most), socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, words in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(words[: len(words) // 4 * 4])
    for fd in descriptors[most:]:  # the kernel rounds lengths up: room for one holds two
        os.close(fd)
    return data, list(descriptors[:most])
