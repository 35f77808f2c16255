"""Long copies in and out of shared memory: through the caches or past them, whichever has been faster lately.

Where the cores of two ranks share a cache, a copy within it is the fastest. Where they share none, each line of the
target must first be taken from the other core's cache, which has just read it, and a copy that goes past the caches (a
stream) is four times as fast. Which it is no rank can know: a virtual machine's cores are moved from one cache to
another while it runs. So each finds out, and for itself: its peer need not do the same.

Source: all_reduce of 8 and 16 MiB, lent, W=2 on an AMD EPYC: through the caches 0.27 and 0.88 ms where cores share
32 MiB, 2.0 and 3.9 ms where they share none; past them 0.47 and 1.2 to 1.5 ms, and 0.55 and 1.1 ms.
"""

from __future__ import annotations

from time import thread_time

import numpy as np

from paceline.links.staging import STREAMED_BYTES

__all__ = ["Copier", "Route"]

_WORTH = 2.0
"""A stream must be so many times as fast: what it has written, whoever reads it next must fetch from main memory."""

_TRIAL_EVERY = 256
"""Operations after which the other way is tried again: two that are four times as slow cost 2 %."""


class Route:
    """Whether copies are to go past the caches, by the rates of those before.

    Each change shows only in the second operation behind it: the first finds in the caches what the other way has left.

    Args:
        first_trial: operations after which the other way is tried for the first time, fewer than those until the next.

    Attributes:
        streams: True if they are.
    """

    def __init__(self, first_trial: int) -> None:
        self.streams = False
        self._first_trial = first_trial
        self._rates = [0.0, 0.0]  # of copies through and past the caches; 0 where none is known
        self._noted = 0
        self._changed = self._on_trial = False

    def note(self, rate: float) -> None:
        """An operation's copies, all of them the way that `streams` says, were so many bytes a second."""
        if self._changed:
            self._changed = False
            return
        was_trial, self._on_trial = self._on_trial, False
        known = self._rates[self.streams]
        self._rates[self.streams] = rate if was_trial or not known else known + (rate - known) / 4
        through, past = self._rates
        streams = past > _WORTH * through
        if not was_trial:
            self._noted += 1
            if self._noted % _TRIAL_EVERY == self._first_trial:
                streams, self._on_trial = not self.streams, True
        self._changed = streams is not self.streams
        self.streams = streams


class Copier:
    """Copies payloads of frames, to staging or to where they belong. For the one thread that writes, or reads, a link.

    Args:
        most: bytes of the longest that may go either way; longer ones always stream.
        first_trial: see `Route`. Who writes and who reads make theirs at other times: what one streams tells on the
            other.
    """

    def __init__(self, most: int, first_trial: int) -> None:
        self._most = most
        self._route = Route(first_trial)
        self._operation = 0
        self._bytes = 0  # that this operation has copied by the route
        self._seconds = 0.0

    @property
    def streams(self) -> bool:
        """True if what has a choice goes past the caches just now."""
        return self._route.streams

    def copy(self, source: bytes | memoryview, target: memoryview, operation: int) -> None:
        """Copies a payload, without the GIL, so that other threads run meanwhile.

        Args:
            source: the payload.
            target: where it goes, as long.
            operation: number of the operation that it is part of.
        """
        size = len(target)
        if size < STREAMED_BYTES or size > self._most:  # too short to stream, or so long that it should
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
            return
        if operation != self._operation:
            self._note()
            self._operation = operation
        step = size if self.streams else (size + 1) // 2  # halves are too short to stream
        here, there = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
        started = thread_time()  # what it waits for the GIL does not count, for there is more of that in two halves
        for start in range(0, size, step):
            np.copyto(here[start : start + step], there[start : start + step])
        self._seconds += thread_time() - started
        self._bytes += size

    def _note(self) -> None:
        if self._seconds:  # a clock may tick more slowly than copies are made
            self._route.note(self._bytes / self._seconds)
        self._bytes, self._seconds = 0, 0.0
