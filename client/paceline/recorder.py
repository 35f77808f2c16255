"""The flight recorder: the last operations of this member, so that after a failure one can see who did what, and when.

It owns what is remembered and how it reads; `session/flight.py` says where that is written, and when. Recording is on
the path of every operation: it stores a few references, parses nothing and takes no lock. No lock, because a snapshot
may be taken at any instant, from a signal handler too that has interrupted the very thread that records.

Remembered are names, shapes and times; never an array, nor a traceback, which would keep arrays alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from math import prod
from typing import Any

from paceline.signature import Signature, dtype_name

__all__ = ["Entry", "FlightRecorder", "error_text"]

MAX_ERROR_CHARACTERS = 1000
"""Longest text of an error that is kept: an error of a user's own may quote whole arrays."""


def error_text(error: BaseException) -> str:
    """Type and text of an error, cut to 1,000 characters; a text that cannot be had is left out."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  a user's class may do anything; the record of the failure matters more
        text = ""
    return (f"{kind}: {text}" if text else kind)[:MAX_ERROR_CHARACTERS]


class Entry:
    """One operation. Made by `FlightRecorder.issue`; `begin` and `end` may be called from any thread, one at a time.

    Attributes:
        group: the group's name; "" is the whole view.
        operation: its number in the group and generation; 0 for messages.
        generation: the generation.
        signature: kind, arguments, dtype and shape, as `paceline.signature.Signature` encodes them.
    """

    __slots__ = (
        "_began",
        "_clock",
        "_ended",
        "_error",
        "_issued",
        "_order",
        "generation",
        "group",
        "operation",
        "signature",
    )

    def __init__(
        self,
        group: str,
        operation: int,
        signature: bytes,
        generation: int,
        order: int,
        issued: float,
        clock: Callable[[], float],
    ) -> None:
        self.group = group
        self.operation = operation
        self.signature = signature
        self.generation = generation
        self._order = order
        self._issued = issued
        self._clock = clock
        self._began: float | None = None
        self._ended: float | None = None
        self._error: str | None = None

    def begin(self) -> None:
        """Its turn has come."""
        self._began = self._clock()

    def end(self, error: BaseException | None = None) -> None:
        """It is over; the first call counts.

        Args:
            error: what it failed with; only type and text are kept.
        """
        if self._ended is None:
            if error is not None:
                self._error = error_text(error)  # before the time: whoever sees the end sees the error too
            self._ended = self._clock()

    def _describe(self, now: float, wall: Callable[[float], str]) -> dict[str, Any]:
        ended, began = self._ended, self._began  # each once, in this order: another thread may be writing them
        if ended is not None:
            state = "done" if self._error is None else "failed"
        else:
            state = "issued" if began is None else "running"
        until = now if ended is None else ended
        return {
            "number": self.operation,
            "group": self.group,
            "generation": self.generation,
            **_parse(self.signature),
            "state": state,
            "issued_at": wall(self._issued),
            "began_at": None if began is None else wall(began),
            "ended_at": None if ended is None else wall(ended),
            "waited_s": _seconds(self._issued, until if began is None else began),
            "took_s": None if began is None else _seconds(began, until),
            "error": None if ended is None else self._error,
        }


class FlightRecorder:
    """The last operations, oldest forgotten first. Thread-safe without a lock; of a fixed size.

    Args:
        capacity: how many operations are remembered.
        clock: seconds that only grow, for the times of operations.
        wall: seconds since 1970, asked once for each snapshot.
    """

    def __init__(
        self,
        capacity: int = 1000,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a flight recorder remembers at least 1 operation, not {capacity}")
        self._capacity = capacity
        self._clock = clock
        self._wall = wall
        self._orders = count()
        # A ring, not a deque: a list may be copied while another thread, or the interrupted one, stores into it.
        self._ring: list[Entry | None] = [None] * capacity

    def issue(self, group: str, operation: int, signature: bytes, generation: int = 0) -> Entry:
        """Remembers an operation that has been issued; for the caller to `begin` and `end`.

        Args:
            group: the group's name; "" is the whole view.
            operation: its number in the group.
            signature: an encoded `Signature`; not looked at here.
            generation: in which that number counts.
        """
        order = next(self._orders)
        entry = Entry(group, operation, signature, generation, order, self._clock(), self._clock)
        self._ring[order % self._capacity] = entry
        return entry

    def find(self, generation: int, group: str, operation: int) -> bytes | None:
        """The signature of an operation; None if it is not remembered (any more)."""
        for entry in reversed(self._entries()):
            if entry.operation == operation and entry.group == group and entry.generation == generation:
                return entry.signature
        return None

    def snapshot(self) -> list[dict[str, Any]]:
        """All that is remembered, oldest first, in types that JSON has.

        Returns:
            One dict for each operation: `number` in the group and generation; `group`; `generation`; `operation`, its
            kind; `detail`, its arguments; `dtype`, `shape` and `bytes` of the array, None where none travels or the
            sender decides; `state`: "issued", "running", "done" or "failed"; `issued_at`, `began_at` and `ended_at`:
            UTC, ISO 8601, None for what has not been; `waited_s`: seconds in line, until now if it still is; `took_s`:
            seconds from its begin, until now if it runs, None if it never began; `error`: type and text, or None.
        """
        entries, now = self._entries(), self._clock()
        offset = self._wall() - now  # one for all, so that differences stay true when the wall clock is set

        def wall(at: float) -> str:
            return datetime.fromtimestamp(at + offset, UTC).isoformat(timespec="microseconds")

        return [entry._describe(now, wall) for entry in entries]

    def _entries(self) -> list[Entry]:
        found = [entry for entry in self._ring.copy() if entry is not None]
        return sorted(found, key=lambda entry: entry._order)


def _seconds(start: float, end: float) -> float:
    return round(max(0.0, end - start), 6)  # it may have begun after the snapshot asked for the time


def _parse(signature: bytes) -> dict[str, Any]:
    try:
        kind, detail, dtype, shape = Signature.decode(signature)
    except ValueError:  # a record must not fail over what it records
        kind, detail, dtype, shape = signature[:80].decode("ascii", "backslashreplace"), "", None, None
    array: dict[str, Any] = {"dtype": None, "shape": None, "bytes": None}
    if dtype is not None and shape is not None:
        array = {"dtype": dtype_name(dtype), "shape": list(shape), "bytes": prod(shape) * dtype.itemsize}
    return {"operation": kind, "detail": detail, **array}
