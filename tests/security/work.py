"""Counts the work that code does, in numbers that no load of the machine changes."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Work", "counted"]


@dataclass
class Work:
    """What was done in a block.

    Attributes:
        calls: functions that were called, of Python or of C; each item that a generator gives counts as one.
        memory: bytes that were allocated at one time at most.
    """

    calls: int = 0
    memory: int = 0


@contextmanager
def counted() -> Iterator[Work]:
    """Counts what this thread does in the block."""
    work = Work()

    def count(frame: object, event: str, argument: object) -> None:
        work.calls += event in ("call", "c_call")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        yield work
    finally:
        sys.setprofile(None)
        work.memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
