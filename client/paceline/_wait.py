"""Waits that a signal can always interrupt.

Python runs signal handlers in the main thread, between two instructions. If a signal arrives just before that thread
blocks in a lock, Python only notes it and nothing wakes the thread: Ctrl-C would have no effect until the wait ends. So
a user's thread never blocks for longer than half a second at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

__all__ = ["SLICE", "Latch", "Outcome", "wait_in_slices"]

T = TypeVar("T")

SLICE = 0.5
"""Seconds that a thread blocks at a time: the longest delay of a signal handler."""


def wait_in_slices(wait: Callable[[float], object], timeout: float | None) -> bool:
    """Calls `wait` with short timeouts until it returns true or the whole time is over.

    Args:
        wait: blocks for at most the given seconds; returns true if the event has happened.
        timeout: seconds in all; None for ever.

    Returns:
        True if the event has happened.
    """
    deadline = None if timeout is None else monotonic() + timeout
    while True:
        left = SLICE if deadline is None else max(0.0, min(SLICE, deadline - monotonic()))
        if wait(left):
            return True
        if deadline is not None and monotonic() >= deadline:
            return False


class Latch:
    """An event that is set once, and stays usable if an interrupt hits a waiting thread at any instruction.

    `threading.Event` has a lock that both sides take. A waiter that is interrupted just after acquiring it keeps it,
    and the thread that wants to set the event blocks for ever (a `Future` did so within 213 interrupts). Here a waiter
    takes no lock that `set` needs.
    """

    def __init__(self) -> None:
        self._setting = threading.Lock()  # `with` enters it in C: an interrupt cannot leave it locked
        self._gate = threading.Lock()  # locked until `set`
        self._gate.acquire()
        self._is_set = False

    def is_set(self) -> bool:
        """Returns True after `set`."""
        return self._is_set

    def set(self) -> None:
        """Sets the event and wakes all waiters. Idempotent."""
        with self._setting:
            if not self._is_set:
                self._is_set = True
                self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for `set`, at most `timeout` seconds; returns True if the event is set."""
        return wait_in_slices(self._pass, timeout)

    def _pass(self, seconds: float) -> bool:
        if not self._is_set and self._gate.acquire(timeout=seconds):
            self._gate.release()  # lets the next waiter pass
        return self._is_set


class Outcome(Generic[T]):
    """A result or an error that one thread sets once and others wait for: a `Latch` with a value."""

    def __init__(self) -> None:
        self._latch = Latch()
        self._value: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Returns True if the result or the error is set."""
        return self._latch.is_set()

    def set_result(self, value: T) -> None:
        """Sets the result."""
        self._value = value
        self._latch.set()

    def set_exception(self, error: BaseException) -> None:
        """Sets the error."""
        self._error = error
        self._latch.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the result or the error, at most `timeout` seconds; returns True if one is set."""
        return self._latch.wait(timeout)

    def result(self) -> T:
        """Returns the result.

        Raises:
            BaseException: the error, if one was set.
        """
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]
