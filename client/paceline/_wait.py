"""Waiting in a way that a signal can always end.

Python runs signal handlers in the main thread, between two instructions. A signal that comes in the very instant before
that thread falls asleep in a lock is only noted, and nothing wakes it: Ctrl-C would be lost until the wait ends. So no
wait of a user's thread sleeps for longer than a moment at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

__all__ = ["SLICE", "Latch", "Outcome", "wait_in_slices"]

T = TypeVar("T")

SLICE = 0.5
"""Seconds that a thread sleeps at a time: how late a handler may run at the worst."""


def wait_in_slices(wait: Callable[[float], object], timeout: float | None) -> bool:
    """Waits for as long as asked, a moment at a time.

    Args:
        wait: sleeps for so many seconds at most; true when what is waited for has come.
        timeout: seconds; None for ever.

    Returns:
        Whether it has come.
    """
    deadline = None if timeout is None else monotonic() + timeout
    while True:
        left = SLICE if deadline is None else max(0.0, min(SLICE, deadline - monotonic()))
        if wait(left):
            return True
        if deadline is not None and monotonic() >= deadline:
            return False


class Latch:
    """An event that comes once, whose waiters an interrupt may hit at any instruction.

    `threading.Event` has a lock that both sides take: a waiter who is interrupted just behind its acquisition keeps
    it, and whoever is to tell waits for ever (as a `Future` did within 213 interrupts). Here a waiter takes nothing
    that a teller needs.
    """

    def __init__(self) -> None:
        self._telling = threading.Lock()  # a lock entered in C: an interrupt cannot leave it taken
        self._gate = threading.Lock()  # shut until it is told
        self._gate.acquire()
        self._is_set = False

    def is_set(self) -> bool:
        """True once it was told."""
        return self._is_set

    def set(self) -> None:
        """Tells it. Idempotent."""
        with self._telling:
            if not self._is_set:
                self._is_set = True
                self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it was told, or for so many seconds; whether it was."""
        return wait_in_slices(self._pass, timeout)

    def _pass(self, seconds: float) -> bool:
        if not self._is_set and self._gate.acquire(timeout=seconds):
            self._gate.release()  # for whoever else waits, or in a moment sees that it was told
        return self._is_set


class Outcome(Generic[T]):
    """What comes of something, told once by one thread to those that wait for it: a `Latch` with a result."""

    def __init__(self) -> None:
        self._told = Latch()
        self._value: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """True once it was told."""
        return self._told.is_set()

    def set_result(self, value: T) -> None:
        """Tells it."""
        self._value = value
        self._told.set()

    def set_exception(self, error: BaseException) -> None:
        """Tells that it failed."""
        self._error = error
        self._told.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it was told, or for so many seconds; whether it was."""
        return self._told.wait(timeout)

    def result(self) -> T:
        """What was told.

        Raises:
            BaseException: what `set_exception` was given.
        """
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]
