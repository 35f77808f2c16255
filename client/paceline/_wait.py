"""Waiting in a way that a signal can always end.

Python runs signal handlers in the main thread, between two instructions. A signal that comes in the very instant before
that thread falls asleep in a lock is only noted, and nothing wakes it: Ctrl-C would be lost until the wait ends. So no
wait of a user's thread sleeps for longer than a moment at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

__all__ = ["SLICE", "wait_in_slices"]

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
