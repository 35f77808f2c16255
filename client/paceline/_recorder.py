"""The flight recorder: a member's last operations, which show after a failure which member did what, and when.

This module defines records and their format; `_session/flight.py` decides where and when they are written. Every
operation is recorded, so recording is cheap: it stores a few references, parses nothing and takes no lock. A lock could
deadlock: a signal handler may take a snapshot at any instant, even while the thread that it interrupts is recording.

A record consists of names, shapes and times, never of an array or a traceback, which would keep arrays alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from math import prod
from typing import Any

from paceline._signature import Signature, dtype_name

__all__ = ["Entry", "FlightRecorder", "error_text"]

_STEPS = 256
_GROUPS = 64
"""Steps, and groups, that are remembered."""

MAX_ERROR_CHARACTERS = 1000
"""Longest text of a recorded error: an error of the user's code may quote whole arrays."""


def error_text(error: BaseException) -> str:
    """Returns type and text of an error, cut to 1,000 characters; without the text if `str` fails."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  a user's class may do anything; the failure must be recorded
        text = ""
    return (f"{kind}: {text}" if text else kind)[:MAX_ERROR_CHARACTERS]


class Entry:
    """The record of an operation, made by `FlightRecorder.issue`. Any thread may call `begin` and `end`, one at a time.

    Attributes:
        group: the group's name; "" for the group of all members.
        operation: the operation's number in the group and generation; 0 for messages.
        generation: the generation.
        signature: kind, arguments, dtype and shape, as `paceline._signature.Signature` encodes them.
        first_rank: the lowest rank in the view among the group's members, which tells parts of one name apart.
    """

    __slots__ = (
        "_began",
        "_clock",
        "_ended",
        "_error",
        "_issued",
        "_order",
        "first_rank",
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
        first_rank: int,
    ) -> None:
        self.group = group
        self.operation = operation
        self.signature = signature
        self.generation = generation
        self.first_rank = first_rank
        self._order = order
        self._issued = issued
        self._clock = clock
        self._began: float | None = None
        self._ended: float | None = None
        self._error: str | None = None

    def begin(self) -> None:
        """Records that the operation begins to run."""
        self._began = self._clock()

    def end(self, error: BaseException | None = None) -> None:
        """Records that the operation is over; later calls do nothing.

        Args:
            error: the operation's error; the record keeps its type and text.
        """
        if self._ended is None:
            if error is not None:
                self._error = error_text(error)  # before the time: a thread that reads the time must find the error
            self._ended = self._clock()

    def _describe(self, now: float, wall: Callable[[float], str]) -> dict[str, Any]:
        ended, began = self._ended, self._began  # read once each, in this order: another thread may set them
        if ended is not None:
            state = "done" if self._error is None else "failed"
        else:
            state = "issued" if began is None else "running"
        until = now if ended is None else ended
        return {
            "number": self.operation,
            "group": self.group,
            "first_rank": self.first_rank,
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
    """The last operations of this member, in a ring of a fixed size. Thread-safe without a lock.

    Args:
        capacity: number of operations that are kept.
        clock: returns monotonic seconds, for the times of operations.
        wall: returns seconds since 1970; called once for each snapshot.
    """

    def __init__(
        self,
        capacity: int = 1000,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a flight recorder keeps at least 1 operation, not {capacity}")
        self._capacity = capacity
        self._clock = clock
        self._wall = wall
        self._orders = count()
        # A ring, not a deque: a list may be copied while another thread, or the interrupted one, stores into it.
        self._ring: list[Entry | None] = [None] * capacity
        self._step_orders = count()
        self._steps: list[tuple[int, int, int, float] | None] = [None] * _STEPS
        self._groups: dict[str, tuple[int, ...]] = {}

    def issue(self, group: str, operation: int, signature: bytes, generation: int = 0, first_rank: int = 0) -> Entry:
        """Records that an operation was issued; returns the record, on which the caller calls `begin` and `end`.

        Args:
            group: the group's name; "" for the group of all members.
            operation: the operation's number in the group and generation.
            signature: an encoded `Signature`; it is not parsed here.
            generation: the generation.
            first_rank: the lowest rank in the view among the group's members.
        """
        order = next(self._orders)
        entry = Entry(group, operation, signature, generation, order, self._clock(), self._clock, first_rank)
        self._ring[order % self._capacity] = entry
        return entry

    def step(self, generation: int, number: int) -> None:
        """Records that all members have entered a step."""
        order = next(self._step_orders)
        self._steps[order % _STEPS] = (order, generation, number, self._clock())

    def know_group(self, name: str, ranks: tuple[int, ...]) -> None:
        """Remembers the members of a group, by their ranks in the view; the latest groups are kept."""
        groups = {key: value for key, value in self._groups.copy().items() if key != name}
        while len(groups) >= _GROUPS:
            del groups[next(key for key in groups if key)]  # not that of all members
        self._groups = groups | {name: ranks}

    def find(self, generation: int, group: str, operation: int) -> bytes | None:
        """Returns the signature of an operation; None if it is not recorded, or not any more."""
        for entry in reversed(self._entries()):
            if entry.operation == operation and entry.group == group and entry.generation == generation:
                return entry.signature
        return None

    def snapshot(self) -> list[dict[str, Any]]:
        """Returns all records, oldest first, in types that JSON has.

        Returns:
            One dict for each operation: `number` in the group and generation; `group`; `first_rank`, the lowest rank of
            the group's members; `generation`; `operation`, its kind; `detail`, its arguments; `dtype`, `shape` and
            `bytes` of the array, None if no array is sent or the sender decides; `state`: "issued", "running", "done"
            or "failed"; `issued_at`, `began_at` and `ended_at`: UTC, ISO 8601, None for what has not happened;
            `waited_s`: seconds in the queue so far; `took_s`: seconds that it ran so far, None if it never began;
            `error`: type and text, or None.
        """
        entries, now = self._entries(), self._clock()
        offset = self._wall() - now  # the same for all, so that setting the wall clock changes no difference

        def wall(at: float) -> str:
            return _wall(at + offset)

        return [entry._describe(now, wall) for entry in entries]

    def record(self) -> dict[str, Any]:
        """Returns all that is remembered, in types that JSON has.

        Returns:
            `operations`, as `snapshot` does; `steps`, oldest first: `generation`, `number`, and `at`, when all members
            had entered the step (UTC, ISO 8601); `groups`: names and ranks of the members in the view.
        """
        steps, offset = sorted(filter(None, self._steps.copy())), self._wall() - self._clock()
        entered = [(generation, number, _wall(at + offset)) for _, generation, number, at in steps]
        return {
            "groups": {name: list(ranks) for name, ranks in self._groups.items()},
            "steps": [{"generation": one, "number": number, "at": at} for one, number, at in entered],
            "operations": self.snapshot(),
        }

    def _entries(self) -> list[Entry]:
        found = [entry for entry in self._ring.copy() if entry is not None]
        return sorted(found, key=lambda entry: entry._order)


def _wall(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds")


def _seconds(start: float, end: float) -> float:
    return round(max(0.0, end - start), 6)  # it may have begun after the snapshot read the clock


def _parse(signature: bytes) -> dict[str, Any]:
    try:
        kind, detail, dtype, shape = Signature.decode(signature)
    except ValueError:  # the recorder must not fail because of what it records
        kind, detail, dtype, shape = signature[:80].decode("ascii", "backslashreplace"), "", None, None
    array: dict[str, Any] = {"dtype": None, "shape": None, "bytes": None}
    if dtype is not None and shape is not None:
        array = {"dtype": dtype_name(dtype), "shape": list(shape), "bytes": prod(shape) * dtype.itemsize}
    return {"operation": kind, "detail": detail, **array}
