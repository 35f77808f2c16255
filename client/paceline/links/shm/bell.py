"""A count that a peer adds to (an eventfd), and how to wait for it: first awake, for a moment, then asleep.

Measured between two processes (x86, 2 cores): a reader that looks again and again, and lets others run in between, has
a count after 3 to 7 us, one that sleeps in poll after 57 us. So it stays awake for as long as answers have come soon
lately. Where ranks outnumber cores, whoever stays awake keeps those from their work that it waits for: it gives up as
soon as it has lost what a sleeper loses (W=4 on 2 cores, medians: 1 MiB 0.73 ms, not 1.08). Not so where it waits for a
mark, for which nobody works.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from time import monotonic

from paceline._wait import SLICE

__all__ = ["AWAKE", "Bell", "Vigil", "awake_for"]

_LOST = 60e-6
"""Seconds that a sleeper loses."""

AWAKE = 200e-6
"""Seconds that a waiter with a core of its own, or for a mark, stays awake at most."""

_WAKE = 1 << 48
"""What a wake adds: no count comes near it, and one descriptor serves both."""


def awake_for(neighbours: int) -> float:
    """Seconds that a waiter stays awake at most.

    Args:
        neighbours: other members on this machine; all may be waiting, or working, at the same time.
    """
    return _LOST if neighbours >= (os.cpu_count() or 1) else AWAKE


class Vigil:
    """Whether it is worth to stay awake: for as long as answers have come soon lately.

    Args:
        most: seconds to stay awake at most.

    Attributes:
        most: as given.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self._usual = 0.0  # seconds that waits have taken lately

    @property
    def is_worth_it(self) -> bool:
        """True if the usual answer comes soon enough."""
        return self._usual < self.most

    def note(self, seconds: float) -> None:
        """A wait has taken so long, asleep or awake."""
        # Longer ones count alike: one of them must not be remembered for ever.
        self._usual += (min(seconds, 4 * self.most) - self._usual) / 4


class Bell:
    """Waits for the counts of one eventfd. One thread waits; `wake` and `close` come from any.

    Args:
        fd: the eventfd, not blocking; closed with this.
        awake: `awake_for`.

    Attributes:
        fd: the eventfd.
    """

    def __init__(self, fd: int, awake: float = AWAKE) -> None:
        self.fd = fd
        self._vigil = Vigil(awake)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._look = self._poll.poll
        self._others: dict[int, Callable[[int], None]] = {}
        self._lock = threading.Lock()  # `wake` must not write to a number that is another file's by now
        self._closed = False

    def watch(self, fd: int, notice: Callable[[int], None]) -> None:
        """Calls `notice(events)` in the waiting thread when it sleeps and something comes on another descriptor."""
        self._others[fd] = notice
        self._poll.register(fd, select.POLLIN)

    def forget(self, fd: int) -> None:
        """Undoes `watch`."""
        if self._others.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def take(self, deadline: float) -> int:
        """What has been counted since the last call. Waits for it until the deadline, `wake`, or for a slice of time.

        Returns:
            The count; 0 if there is none yet.
        """
        if self._closed:
            return 0
        events = self._look(0)
        if not events:
            started = monotonic()
            if started >= deadline:
                return 0
            events = self._wait(started, deadline)
        count = 0
        for fd, what in events:
            if fd == self.fd:
                count = self.read()
            else:
                self._others[fd](what)
        return count

    def read(self) -> int:
        """What has been counted since the last call, without a wait; 0 for nothing."""
        if self._closed:
            return 0
        try:
            return os.eventfd_read(self.fd) % _WAKE
        except BlockingIOError:  # after `poll` too: the peer may read it, to its own harm
            return 0

    def _wait(self, started: float, deadline: float) -> list[tuple[int, int]]:
        look, pause, vigil = self._look, os.sched_yield, self._vigil
        if vigil.is_worth_it:
            until = min(started + vigil.most, deadline)
            while True:
                pause()
                if events := look(0):
                    break
                if (now := monotonic()) >= until:
                    events = look(1000 * max(0.0, min(SLICE, deadline - now)))
                    break
        else:
            events = look(1000 * min(SLICE, deadline - started))
        vigil.note(monotonic() - started)
        return events

    def wake(self) -> None:
        """Makes the waiter return."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # counted to the brim, it wakes the waiter as well
                    os.eventfd_write(self.fd, _WAKE)

    def close(self) -> None:
        """Closes the eventfd. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
