"""Arrays in memory that peers can read where it lies: what `empty` gives, a link can lend without a copy.

A block goes back when its array, and every view of it, is gone. Sealed memory cannot be given back in parts (the seal
against other writers forbids holes), so a segment goes when all of it is free; one of ordinary size is kept.
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

from paceline._arrays import Array
from paceline._links.shm.control_segment import PAGE
from paceline._links.shm.segment import Segment
from paceline.errors import LinkUnavailable

__all__ = ["Arena", "ArenaSegment", "FreeBlocks", "LEND_BYTES", "SEGMENT_BYTES", "Watcher", "arena"]

SEGMENT_BYTES = 64 << 20
"""Size of a segment; an array that is larger has one of its own."""

LEND_BYTES = 64 << 10
"""Smaller payloads are copied when they are sent: to wait for their release takes longer than that."""

_log = logging.getLogger("paceline.links")
_numbers = count(1)


class Watcher(Protocol):
    """Whoever must hear of segments that go."""

    def retired(self, number: int) -> None:
        """That segment is gone. Called in any thread, and in the middle of anything; must not block."""


class ArenaSegment(Segment):
    """A segment of an arena.

    Attributes:
        number: never used again in this process; peers know the segment by it.
        blocks: what is free in it.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.number = next(_numbers)
        self.blocks = FreeBlocks(size)


class Arena:
    """Shared memory for arrays. Thread-safe.

    A forked child shares what its parent had: it reads and writes the same arrays, but neither frees them nor gets new
    ones there.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._freed: deque[tuple[ArenaSegment, int, int]] = deque()  # by finalizers, which may run anywhere
        # Replaced as one, so that readers need no lock: where segments begin, ascending, and the segments.
        self._index: tuple[list[int], list[ArenaSegment]] = ([], [])
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        # Never held for long, for loops take it; a collection under it may free a segment in the same thread.
        self._watching = threading.RLock()
        self._warned = False

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = float) -> Array:
        """A new array, as `np.empty` makes it. Small ones (`LEND_BYTES`) come from there.

        Where shared memory or descriptors run out, ordinary memory is given, and the log says so once.
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
        root = np.frombuffer(segment.memory, np.uint8, nbytes, offset)  # every view of it keeps it
        weakref.finalize(root, self._free, segment, offset, size).atexit = False
        return root.view(kind).reshape(shape)

    def find(self, address: int, nbytes: int) -> tuple[ArenaSegment, int] | None:
        """The segment that so many bytes of this process lie in, and where in it; None if they lie elsewhere."""
        starts, segments = self._index
        at = bisect_right(starts, address) - 1
        if at < 0:
            return None
        segment = segments[at]
        offset = address - segment.address
        return (segment, offset) if offset + nbytes <= segment.size else None

    def watch(self, watcher: Watcher) -> None:
        """Has `watcher.retired(number)` called when a segment goes, for as long as there is a watcher."""
        with self._watching:
            self._watchers.add(watcher)

    @property
    def segments(self) -> list[ArenaSegment]:
        """All there are."""
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
        """Takes back what is freed, unless whoever holds the lock will; it may be this very thread, in a collection."""
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
    """The arena of this process; a forked child has another."""
    return _arena


def _renew() -> None:
    global _arena
    _arena = Arena()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class FreeBlocks:
    """The free parts of `size` bytes. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._starts = [0]
        self._sizes = [size]

    @property
    def is_whole(self) -> bool:
        """True if all is free."""
        return self._sizes == [self._size]

    def take(self, size: int) -> int | None:
        """Takes the first part that is large enough; where it begins, None if there is none."""
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
        """Gives back what was taken."""
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and start + size == self._starts[at]:
            size += self._sizes[at]
            del self._starts[at], self._sizes[at]
        if at and self._starts[at - 1] + self._sizes[at - 1] == start:
            self._sizes[at - 1] += size
        else:
            self._starts.insert(at, start)
            self._sizes.insert(at, size)
