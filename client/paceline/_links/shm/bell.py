"""A counter that a peer adds to (an eventfd), and how a thread waits for it: it spins for a moment, then sleeps.

Measured between two processes (x86, 2 cores): a reader that polls in a loop and yields the core in between sees a count
after 3 to 7 us; one that sleeps in poll, after 57 us. So a reader spins while recent waits were short. Where ranks
outnumber cores, a spinning thread takes the core from the rank it waits for; there it spins only as long as waking from
sleep would take (W=4 on 2 cores, medians: 1 MiB 0.73 ms, not 1.08). A wait for a mark spins longer, since no rank has
to work for a mark.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from time import monotonic

from paceline._base.waits import SLICE

_LOST = 60e-6
"""Seconds that waking from sleep costs."""

AWAKE = 200e-6
"""Longest spin in seconds of a thread that has a core of its own, or that waits for a mark."""

_WAKE = 1 << 48
"""`wake` adds this to the eventfd: more than any count, so that one descriptor can carry counts and wakes."""


def awake_for(neighbours: int) -> float:
    """Returns the longest spin in seconds of a waiting thread, with so many other members on its machine."""
    return _LOST if neighbours >= (os.cpu_count() or 1) else AWAKE


class SpinPolicy:
    """Decides whether a wait begins with spinning: it does while recent waits were shorter than the longest spin."""

    def __init__(self, most: float) -> None:
        self.most = most
        self._usual = 0.0  # seconds that waits have taken lately

    @property
    def should_spin(self) -> bool:
        """True if the average of recent waits is shorter than `most`."""
        return self._usual < self.most

    def note(self, seconds: float) -> None:
        """Records how long a wait took, spinning or asleep."""
        # Capped, so that one very long wait does not prevent spinning for many waits.
        self._usual += (min(seconds, 4 * self.most) - self._usual) / 4


class Bell:
    """Waits for the counts of one eventfd. One thread waits; `wake` and `close` come from any.

    The eventfd does not block, and is owned from here on. `awake` is the longest spin in seconds (`awake_for`).
    """

    def __init__(self, fd: int, awake: float = AWAKE) -> None:
        self.fd = fd
        self.slice_s = SLICE  # longest sleep in seconds
        self._spinning = SpinPolicy(awake)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._look = self._poll.poll
        self._others: dict[int, Callable[[int], None]] = {}
        self._lock = threading.Lock()  # `wake` must not write to a descriptor that is another file's by now
        self._closed = False

    def watch(self, fd: int, notice: Callable[[int], None]) -> None:
        """Calls `notice(events)` in the waiting thread when it sleeps and another descriptor has events."""
        self._others[fd] = notice
        self._poll.register(fd, select.POLLIN)

    def forget(self, fd: int) -> None:
        """Undoes `watch`."""
        if self._others.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def take(self, deadline: float) -> int:
        """Takes the count since the last call, waiting for one until the deadline, `wake`, or the end of a time slice.

        Returns 0 if nothing has been counted.
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
        """Takes the count since the last call without waiting; 0 if nothing has been counted."""
        if self._closed:
            return 0
        try:
            return os.eventfd_read(self.fd) % _WAKE
        except BlockingIOError:  # possible after `poll` too: a misbehaving peer may read it
            return 0

    def _wait(self, started: float, deadline: float) -> list[tuple[int, int]]:
        look, pause, spinning = self._look, os.sched_yield, self._spinning
        if spinning.should_spin:
            until = min(started + spinning.most, deadline)
            while True:
                pause()
                if events := look(0):
                    break
                if (now := monotonic()) >= until:
                    events = look(1000 * max(0.0, min(self.slice_s, deadline - now)))
                    break
        else:
            events = look(1000 * min(self.slice_s, deadline - started))
        spinning.note(monotonic() - started)
        return events

    def wake(self) -> None:
        """Makes the waiting thread return."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # a saturated counter wakes the waiter too
                    os.eventfd_write(self.fd, _WAKE)

    def close(self) -> None:
        """Closes the eventfd. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
