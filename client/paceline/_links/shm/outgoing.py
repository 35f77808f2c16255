"""The writer's half: it writes frames into the control segment, and adds counts to the peer's bell.

A small payload lies in the frame's slot, a larger one in staging. A lent payload in an arena stays there.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from collections import deque
from time import monotonic
from typing import NoReturn

import numpy as np

from paceline._base.arrays import MAX_SIGNATURE_BYTES, copy_bytes
from paceline._base.processes import check_process
from paceline._links.base import MARKS, LinkEnded, LinkTimeout, Peer
from paceline._links.fault import Fault, Suspicion
from paceline._links.frame import Frame, FrameError, FrameKind
from paceline._links.kind import Outgoing
from paceline._links.shm import arena as arenas
from paceline._links.shm.bell import Bell, awake_for
from paceline._links.shm.control_segment import (
    FRAME,
    INLINE_BYTES,
    MARK,
    MAX_PAYLOAD_BYTES,
    SLOTS,
    STAGING_AT,
    STAGING_BYTES,
    ControlMemory,
    Descriptor,
    PayloadPlace,
    staging_bytes,
)
from paceline._links.shm.segment import Segment
from paceline.errors import LimitExceeded
from pacelinepb.v1.errors_pb2 import ErrorReason

ANNOUNCEMENT = struct.Struct("<QQ")
"""Number and size of an arena's segment, sent with its descriptor. Size 0, without a descriptor, says that the segment
is gone."""

_STEP = 1 << 20
"""Bytes of staging that are backed with memory at a time."""


class ShmOutgoing(Outgoing):
    """Frames to one peer of this host. `handover.connect` makes it.

    It owns segment, eventfds and socket, which carries descriptors of arenas' segments and does not block. `bell`
    counts frames and marks, `room` the frames that the reader has released. `neighbours` are other members on this
    machine, which share its memory and cores.
    """

    kind = "shm"

    def __init__(
        self, fault: Fault, peer: Peer, sock: socket.socket, segment: Segment, bell: int, room: int, neighbours: int
    ) -> None:
        self._room = Bell(room, awake_for(neighbours))  # first, because it may fail
        self.frames = 0
        self.sent_bytes = 0
        self._fault = fault
        self._peer = peer
        self._sock = sock
        self._segment = segment
        self._control = ControlMemory(segment.memory)
        self._marked = 0
        self._bell = bell
        self._rung = 0  # frames that the bell has been told of
        self._released = 0
        self._lent_until = 0  # nothing is lent once the frames before this one are released
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._ended: LinkEnded | None = None
        self._closed = False
        # Staging is a ring: bytes are taken at the head, and freed at the tail in the order of the frames.
        self._staged: deque[tuple[int, int]] = deque()  # number of the frame, head after it
        self._head = self._tail = 0
        self._ring = staging_bytes(neighbours)
        self._arena = arenas.arena()
        self._announced: set[int] = set()
        self._stale: set[int] = set()  # announced, but gone since
        self._arena.watch(self)

    def send(self, frame: Frame, deadline: float) -> None:
        """See `Outgoing.send`. Copies the payload."""
        payload = frame.payload
        size = len(payload)
        check_process()
        self._await_slot(deadline)
        if size <= INLINE_BYTES:
            self._control.inline(self.frames, size)[:] = payload
            self._publish(frame, size, PayloadPlace.SLOT, 0, 0)
        else:
            self._publish(frame, size, PayloadPlace.STAGING, 0, self._stage(frame, size, deadline))

    def lend(self, frame: Frame, deadline: float) -> None:
        """See `Outgoing.lend`. Copies payloads that are small or outside of the arena."""
        check_process()
        size, found = len(frame.payload), None
        if arenas.LEND_BYTES <= size <= MAX_PAYLOAD_BYTES:
            found = self._arena.find(np.frombuffer(frame.payload, np.uint8).ctypes.data, size)
        if found is None or (found[0].number not in self._announced and not self._announce(found[0])):
            self.send(frame, deadline)
            return
        segment, offset = found
        self._await_slot(deadline)
        self._lent_until = self.frames + 1
        self._publish(frame, size, PayloadPlace.ARENA, segment.number, offset)

    def mark(self, number: int) -> bool:
        """See `Outgoing.mark`."""
        if self._fault.failed or self._ended is not None:
            self._check()
        self._control.marks[self._marked % MARKS] = number
        self._marked += 1
        self._tell(MARK)
        return True

    def await_release(self, deadline: float) -> None:
        """See `Outgoing.await_release`."""
        while self._released < self._lent_until:
            self._await_release(deadline, "has not finished reading the arrays that it was lent")

    def recall(self) -> None:
        """See `Outgoing.recall`. The peer detects this when it releases what it read."""
        with self._closing:
            if not self._closed:
                self._take_back()

    def _take_back(self) -> None:
        if self._released < self._lent_until:
            self._control.set_void()
            for _ in range(2):  # as a full barrier: the peer sees the flag before anything written later
                with self._lock:
                    pass
        self._lent_until = 0

    def flush(self, deadline: float) -> None:
        """See `Outgoing.flush`. Does nothing, because shared memory outlives its writer."""

    def wake(self) -> None:
        """See `Outgoing.wake`."""
        self._room.wake()

    def end(self, error: LinkEnded) -> None:
        """See `Outgoing.end`."""
        if self._ended is None:
            self._ended = error
        self._room.wake()

    def close(self) -> None:
        """See `Outgoing.close`. The peer keeps what it has mapped, and reads all that was sent."""
        self._ended = self._ended or LinkEnded(f"the link to {self._peer} was closed here", orderly=True)
        with self._closing:
            if self._closed:
                return
            # A mesh may end before the failed operation calls `recall`, so this sets the void flag before it closes.
            self._take_back()
            self._closed = True
        self._sock.close()
        os.close(self._bell)
        self._room.close()
        self._segment.close()
        del self._control

    def retired(self, number: int) -> None:
        """Tells the peer that a segment of the arena is gone. Called in any thread."""
        if number in self._announced:
            self._announced.discard(number)
            self._stale.add(number)
            self._tell_stale()

    def _publish(self, frame: Frame, size: int, place: PayloadPlace, segment: int, offset: int) -> None:
        """Describes a frame in its slot, which must be free, then rings the bell."""
        number, words = self.frames, len(frame.signature)
        if words > MAX_SIGNATURE_BYTES:
            raise FrameError(f"a signature of {words} bytes is above the limit of {MAX_SIGNATURE_BYTES}")
        descriptor = Descriptor(
            number, FrameKind.DATA, frame.part, frame.generation, frame.operation, place, words, size, segment, offset
        )
        self._control.describe(descriptor, frame.signature)
        # In this order an interrupt loses no count. The reader detects a double count by the frame's number.
        self.frames = self._control.told[0] = number + 1
        self.sent_bytes += size
        self._tell(FRAME * (number + 1 - self._rung))
        self._rung = number + 1

    def _tell(self, count: int) -> None:
        try:
            os.eventfd_write(self._bell, count)
        except BlockingIOError:
            breach(self._fault, self._peer, "the counter of its bell overflowed")

    def _await_slot(self, deadline: float) -> None:
        if self._fault.failed or self._ended is not None:
            self._check()
        while self.frames - self._released >= SLOTS:
            self._await_release(deadline, "receives nothing")

    def _check(self) -> None:
        self._fault.check()
        if self._ended is not None:
            raise again(self._ended)

    def _await_release(self, deadline: float, why: str) -> None:
        """Waits a moment until the reader releases frames. Raises if the link has ended or the deadline has passed."""
        over = self._fault.failed or self._ended is not None  # read before it sleeps: another call may use up the wake
        if self._take_room(0.0 if over else deadline):
            return
        self._check()
        if monotonic() >= deadline:
            raise LinkTimeout(f"{self._peer} {why}")

    def _take_room(self, deadline: float) -> int:
        count = self._room.take(deadline)
        if count:
            if count > self.frames - self._released:
                breach(self._fault, self._peer, f"it released {count} frames of {self.frames - self._released}")
            self._released += count
            staged = self._staged
            while staged and staged[0][0] < self._released:
                self._tail = staged.popleft()[1]
            if not staged:
                self._head = self._tail = 0  # keeps a ring that is rarely full in the caches
        return count

    def _stage(self, frame: Frame, size: int, deadline: float) -> int:
        """Copies a frame's payload into staging. Returns its offset."""
        if size > MAX_PAYLOAD_BYTES:
            raise FrameError(f"a payload of {size} bytes is above the limit of {MAX_PAYLOAD_BYTES}")
        self._take_room(0.0)
        while (at := self._fit(size)) is None:
            self._await_release(deadline, "receives nothing")
        end = at % self._ring + size
        try:
            self._segment.back(STAGING_AT + min(STAGING_BYTES, -(-end // _STEP) * _STEP))
        except OSError as error:
            text = f"no shared memory is left for a frame of {size} bytes to {self._peer}: {error}"
            raise LimitExceeded(text) from error
        offset = STAGING_AT + at % self._ring
        copy_bytes(frame.payload, self._control.staged(offset, size))
        self._staged.append((self.frames, at + size))
        self._head = at + size
        return offset

    def _fit(self, size: int) -> int | None:
        """Returns the position of `size` contiguous free bytes; None if there are none yet. Positions only grow."""
        if not self._staged:  # fits any payload: none is longer than all of staging
            return 0
        ring, at = self._ring, -(-self._head // 64) * 64  # a cache line
        if at % ring + size > ring:
            at += ring - at % ring
        return at if at + size - self._tail <= ring else None

    def _announce(self, segment: arenas.ArenaSegment) -> bool:
        """Gives the peer a segment of the arena. Returns False if that is not possible now."""
        self._tell_stale()
        descriptor = array.array("i", [segment.fd])
        word = ANNOUNCEMENT.pack(segment.number, segment.size)
        try:
            self._sock.sendmsg([word], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)])
        except OSError:  # full, or the peer is gone, which the link's stream reports; a copy will do
            return False
        self._announced.add(segment.number)
        return True

    def _tell_stale(self) -> None:
        for number in list(self._stale):
            try:
                self._sock.send(ANNOUNCEMENT.pack(number, 0))
            except OSError:  # as above; sent when there is room, and useless to a peer that is gone
                return
            self._stale.discard(number)


def breach(fault: Fault, peer: Peer, what: str) -> NoReturn:
    """Ends the generation, because the peer broke the protocol, and raises its error."""
    text = f"{peer} broke the protocol: {what}"
    fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL, peer.rank, 0, text))
    raise fault.error()


def again(error: LinkEnded) -> LinkEnded:
    """Copies the error that ended a link, because an exception that is raised twice grows its traceback."""
    return LinkEnded(str(error), orderly=error.orderly)
