"""Frames in one direction between two threads, by reference: what a local link is made of.

A lent frame stays its sender's memory. It counts as lent from `put` until the reader's `release`; `settle` and `recall`
give it back to the sender.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from paceline.links.base import LinkEnded, LinkTimeout
from paceline.links.fault import Fault
from paceline.links.frame import Frame

__all__ = ["CAPACITY", "Pipe"]

CAPACITY = 64
"""Frames that a link holds before `send` waits."""


class Pipe:
    """One direction of a link. One thread writes and one reads; deadlines are `time.monotonic()` values.

    Attributes:
        on_change: called whenever there may be something to read, under the pipe's lock: it must not block.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # entered in C: an interrupt cannot leave it taken, as it can a Condition
        self._changed = threading.Condition(self._lock)
        self._frames: deque[tuple[Frame, bool]] = deque()  # and whether it is lent
        self._lent = 0  # frames that are lent: in the deque, or being read
        self._reading = 0  # of them: those that are being read
        self._end: LinkEnded | None = None
        self.on_change: Callable[[], None] = _nothing

    def put(self, frame: Frame, deadline: float, fault: Fault, *, lent: bool = False) -> None:
        """Adds a frame, waiting for room until the deadline; `lent`: its payload stays the writer's."""
        with self._lock:
            while self._end is None and len(self._frames) >= CAPACITY and not fault.failed:
                self._wait(deadline, "the other side takes nothing in")
            if self._end is None and not fault.failed:
                self._frames.append((frame, lent))
                self._lent += lent
                self._tell()
                return
        raise self._error(fault)

    def settle(self, deadline: float, fault: Fault) -> None:
        """Waits until the reader has released all that was lent."""
        with self._lock:
            while self._lent and self._end is None and not fault.failed:
                self._wait(deadline, "the other side still reads")
            if not self._lent:
                return
        raise self._error(fault)

    def recall(self) -> None:
        """Takes back what is lent: frames that wait are dropped, the one that is being read is waited for."""
        with self._lock:
            self._frames = deque((frame, False) for frame, lent in self._frames if not lent)
            self._lent = self._reading
            while self._reading:  # not for long: who reads waits for nothing, or is woken by the failure
                self._changed.wait()

    def release(self) -> None:
        """The reader needs what it has read no longer."""
        if self._reading:
            with self._lock:
                self._lent -= self._reading
                self._reading = 0
                if not self._lent:
                    self._changed.notify_all()

    def get(self, deadline: float, fault: Fault) -> Frame:
        """The next frame of the fault's generation (`Link.recv`)."""
        with self._lock:
            self._drop_before(fault.generation)
            while not self._frames and self._end is None and not fault.failed:
                self._wait(deadline, "no frame came")
                self._drop_before(fault.generation)
            if self._frames and not fault.failed:
                if len(self._frames) >= CAPACITY:
                    self._changed.notify_all()
                frame, lent = self._frames.popleft()
                self._reading += lent
                return frame
        raise self._error(fault)

    def _error(self, fault: Fault) -> LinkEnded:
        """How the pipe ended, unless the generation has failed, which it raises."""
        fault.check()  # not under the lock: it may wait for a verdict
        assert self._end is not None
        return LinkEnded(str(self._end), orderly=self._end.orderly)

    def _drop_before(self, generation: int) -> None:
        """Frames of a generation that is over may still be here, of which nothing is lent any more."""
        while self._frames and self._frames[0][0].generation < generation:
            self._frames.popleft()
            self._changed.notify_all()

    def end(self, *, orderly: bool) -> None:
        """Nothing follows; what is here can still be read."""
        with self._lock:
            if self._end is None:
                how = "closed" if orderly else "broken"
                self._end = LinkEnded(f"the link was {how} by the other side", orderly=orderly)
                self._tell()

    def wake(self) -> None:
        """Makes blocked calls look at the fault."""
        with self._lock:
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        self.on_change()

    def _wait(self, deadline: float, why: str) -> None:
        left = deadline - monotonic()
        if left <= 0 or not self._changed.wait(left):
            raise LinkTimeout(f"{why} before the deadline")


def _nothing() -> None:
    """Stands where no reader asked to be told of arrivals."""
