"""Arrays in memory that peers can read in place: a link can lend an array from `empty` without a copy.

A block is freed when its array and every view of it are gone. Sealed memory cannot be returned to the system in parts
(the seal against other writers forbids holes), so a segment is closed when all of it is free. One free segment of
ordinary size is kept.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from itertools import count
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline._base.arrays import Array
from paceline._links.shm.control_segment import PAGE
from paceline._links.shm.segment import Segment
from paceline.errors import LinkUnavailable

SEGMENT_BYTES = 64 << 20
"""Size of a segment in bytes; a larger array has a segment of its own."""

LEND_BYTES = 64 << 10
"""Smaller payloads are copied when they are sent: waiting for their release would take longer."""

_log = logging.getLogger("paceline.links")
_numbers = count(1)


class Watcher(Protocol):
    """An object that is notified when segments are closed."""

    def retired(self, number: int) -> None:
        """Handles the end of a segment. Called in any thread, at any point of its code; must not block."""


class ArenaSegment(Segment):
    """A segment of an arena. Peers know it by its number, which is never used again in this process."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.number = next(_numbers)
        self.blocks = FreeBlocks(size)


class Arena:
    """Shared memory for arrays. Thread-safe.

    A forked child shares its parent's arrays: it reads and writes them, but neither frees them nor allocates in the
    parent's arena.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._freed: deque[tuple[ArenaSegment, int, int]] = deque()  # filled by finalizers, which may run anywhere
        # The ascending start addresses of the segments, and the segments. Replaced in one assignment, so that readers
        # need no lock.
        self._index: tuple[list[int], list[ArenaSegment]] = ([], [])
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        # Never held for long, because loops take it. It is an RLock because a garbage collection while it is held may
        # free a segment in the same thread.
        self._watching = threading.RLock()
        self._warned = False

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = float) -> Array:
        """Returns a new uninitialized array. Arrays below `LEND_BYTES` come from `np.empty`.

        If shared memory or descriptors run out, the array is in ordinary memory, and the log says so once.
        """
        kind = np.dtype(dtype)
        nbytes = prod(shape if isinstance(shape, tuple) else (shape,)) * kind.itemsize
        if nbytes < LEND_BYTES or kind.hasobject or os.getpid() != self._pid:
            return np.empty(shape, kind)
        size = -(-nbytes // PAGE) * PAGE
        try:
            segment, offset = self._allocate(size)
        except (OSError, LinkUnavailable) as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "no shared memory for an array of %d bytes, which will be copied to peers: %s", size, error
                )
            return np.empty(shape, kind)
        finally:
            self._sweep()
        root = np.frombuffer(segment.memory, np.uint8, nbytes, offset)  # every view keeps it alive
        weakref.finalize(root, self._free, segment, offset, size).atexit = False
        return root.view(kind).reshape(shape)

    def find(self, address: int, nbytes: int) -> tuple[ArenaSegment, int] | None:
        """Returns the segment in which `nbytes` at an address lie, and their offset; None if they lie elsewhere."""
        starts, segments = self._index
        at = bisect_right(starts, address) - 1
        if at < 0:
            return None
        segment = segments[at]
        offset = address - segment.address
        return (segment, offset) if offset + nbytes <= segment.size else None

    def watch(self, watcher: Watcher) -> None:
        """Calls `watcher.retired(number)` when a segment is closed, as long as the watcher exists."""
        with self._watching:
            self._watchers.add(watcher)

    @property
    def segments(self) -> list[ArenaSegment]:
        """All segments."""
        return list(self._index[1])

    def _allocate(self, size: int) -> tuple[ArenaSegment, int]:
        with self._lock:
            self._take_back()
            for segment in self._index[1]:
                offset = segment.blocks.take(size)
                if offset is not None:
                    break
            else:
                segment = ArenaSegment(max(SEGMENT_BYTES, size))
                self._keep([*self._index[1], segment])
                offset = segment.blocks.take(size)
                assert offset is not None
            try:
                segment.back(offset + size)
            except OSError:
                segment.blocks.give(offset, size)
                raise
            return segment, offset

    def _free(self, segment: ArenaSegment, offset: int, size: int) -> None:
        if os.getpid() == self._pid:
            self._freed.append((segment, offset, size))
            self._sweep()

    def _sweep(self) -> None:
        """Takes back freed blocks. The lock's holder does it if there is one, perhaps this thread, in a collection."""
        while self._freed and self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._freed:
            segment, offset, size = self._freed.popleft()
            segment.blocks.give(offset, size)
        whole = [segment for segment in self._index[1] if segment.blocks.is_whole]
        kept = next((segment for segment in whole if segment.size == SEGMENT_BYTES), None)
        gone = [segment for segment in whole if segment is not kept]
        if gone:
            self._keep([segment for segment in self._index[1] if segment not in gone])
        for segment in gone:
            segment.close()
        if gone:
            with self._watching:
                watchers = list(self._watchers)
            for watcher in watchers:
                for segment in gone:
                    watcher.retired(segment.number)

    def _keep(self, segments: list[ArenaSegment]) -> None:
        segments.sort(key=lambda segment: segment.address)
        self._index = ([segment.address for segment in segments], segments)


_arena = Arena()


def arena() -> Arena:
    """Returns the arena of this process; a forked child has another."""
    return _arena


def _renew() -> None:
    global _arena
    _arena = Arena()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class FreeBlocks:
    """The free blocks among `size` bytes. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._starts = [0]
        self._sizes = [size]

    @property
    def is_whole(self) -> bool:
        """True if all bytes are free."""
        return self._sizes == [self._size]

    def take(self, size: int) -> int | None:
        """Takes from the first block that is large enough. Returns where it begins; None if there is none."""
        for at, free in enumerate(self._sizes):
            if free >= size:
                start = self._starts[at]
                if free == size:
                    del self._starts[at], self._sizes[at]
                else:
                    self._starts[at] += size
                    self._sizes[at] -= size
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Gives back a block that was taken."""
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and start + size == self._starts[at]:
            size += self._sizes[at]
            del self._starts[at], self._sizes[at]
        if at and self._starts[at - 1] + self._sizes[at - 1] == start:
            self._sizes[at - 1] += size
        else:
            self._starts.insert(at, start)
            self._sizes.insert(at, size)
