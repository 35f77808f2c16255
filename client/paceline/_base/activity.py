"""A member's activity: counts for its heartbeats and `session.stats()`, and the flight recorder.

**The flight recorder** has a member's last operations, which show after a failure which member did what, and when.
`_session/flight.py` decides where and when they are written. Every operation is recorded, so recording is cheap: it
stores a few references, parses nothing and takes no lock. A lock could deadlock: a signal handler may take a snapshot
at any instant, even while the thread that it interrupts is recording. A record consists of names, shapes and times,
never of an array or a traceback, which would keep arrays alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from math import prod
from statistics import median
from threading import get_ident
from time import monotonic
from typing import Any, NamedTuple

from paceline._base.arrays import Signature, dtype_name
from paceline_protocol import Counters
from pacelinepb import MOST_LOGGED, MOST_NAME_BYTES

_SPEEDS = 9
_FEWEST_SPEEDS = 3
"""Measurements of which a speed is the median, and how many there must be: the first may load and compile."""

_MEASURED_S = 0.2
"""Least seconds of a measurement. Shorter steps are measured together: the system may delay a single one for long."""


class _Checkpoints(NamedTuple):
    step: int = 0
    written: int = 0
    failures: int = 0
    seconds: float = 0.0


class MemberCounters:
    """Counters of one member, over all generations. Threads that train or write a checkpoint count; any may read.

    Samples are those of its own share. `undone` counts steps that it began, `skipped` committed steps in which no
    member made an update, and `left_out` its samples in those. `waited` is seconds in collectives, of all threads;
    `state_time` is seconds that it has spent in fetching state from other members; `share` its part of a batch, 0 to 1;
    `total` the last step that its loop is to take, 0 without one; `operations` all that were begun, in all groups.
    """

    def __init__(self) -> None:
        self.committed = self.undone = self.samples = 0
        self.skipped = self.left_out = 0
        self.waited = 0.0
        self.state_bytes, self.state_time = 0, 0.0
        self._sent: dict[str, int] = {}  # in generations that are over
        self._told = Counters()
        self._checkpoints = _Checkpoints()  # replaced as a whole, so that a reader never sees half of a checkpoint
        self._useful = 0.0
        self._since: float | None = None  # when the first step began
        self._mark: float | None = None  # when the present step began; None if none has since the last meeting
        self._applied = self._passed_over = (0, 0)  # the last step that was applied, or skipped, and its samples
        self.share = 0.0
        self.total = 0
        self.operations = 0
        self._logged: dict[str, float] = {}  # replaced as a whole
        self._trainer = 0  # the thread that begins steps
        self._trainer_waited = 0.0  # its part of `waited`
        self._after: tuple[float, float] | None = None  # when the last step was applied, and its waits until then
        self._speeds: tuple[float, ...] = ()  # replaced as a whole
        self._measured = (0, 0.0, 0.0)  # samples, seconds, and seconds without waits of the running measurement
        self._new_speeds = 0

    # Steps ------------------------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Takes note that a step begins, or is tried again."""
        now = monotonic()
        self._since = now if self._since is None else self._since
        self._mark = now if self._mark is None else self._mark
        self._trainer = get_ident()

    def step_applied(self, number: int, samples: int, *, has_speed: bool = True) -> None:
        """Takes note that the step has changed the state of this member, whose share has this many samples.

        `has_speed` is False if the time since the step before does not show how fast this member computes.
        """
        now = monotonic()
        self._useful += now - (now if self._mark is None else self._mark)
        self._mark, self._applied = now, (number, samples)
        before, self._after = self._after, (now, self._trainer_waited)
        if before is not None and samples and has_speed:
            self._measure(samples, now - before[0], self._trainer_waited - before[1])

    def step_skipped(self, number: int, samples: int) -> None:
        """Takes note that all members skip the step, so the samples of this member's share are left out."""
        self._mark, self._passed_over = monotonic(), (number, samples)
        self._after = self._mark, self._trainer_waited

    def step_undone(self) -> None:
        """Takes note that the step was undone."""
        self.undone += 1
        self._mark = self._after = None

    def step_committed(self, number: int) -> None:
        """Takes note that the step counts on every member."""
        self.committed += 1
        if self._applied[0] == number:
            self.samples += self._applied[1]
        elif self._passed_over[0] == number:
            self.skipped += 1
            self.left_out += self._passed_over[1]

    def stopped(self) -> None:
        """Takes note that this member waits for the next generation."""
        self._mark = self._after = None

    def _measure(self, samples: int, seconds: float, waited: float) -> None:
        """Adds a step to the running measurement of the speed, and ends that if it is long enough."""
        before = self._measured
        self._measured = counted, took, own = before[0] + samples, before[1] + seconds, before[2] + seconds - waited
        if took >= _MEASURED_S and own > 0:
            self._speeds = (*self._speeds, counted / own)[-_SPEEDS:]
            self._measured = (0, 0.0, 0.0)
            self._new_speeds += 1

    def forget_speeds(self) -> None:
        """Measures the speed of this member anew: it was measured with another share, or of another loop."""
        self._speeds, self._measured, self._new_speeds = (), (0, 0.0, 0.0), 0

    @property
    def speed(self) -> float:
        """Samples that this member computes in a second, without the time in which its steps wait in collectives.

        The median of its last measurements, with what takes as long for any number of samples; 0 until there are some.
        The first step of a generation does not count: it may have been repaired, and opens links.
        """
        speeds = self._speeds
        return median(speeds) if len(speeds) >= _FEWEST_SPEEDS else 0.0

    @property
    def new_speed(self) -> float:
        """The speed if it was measured often enough since `speed_told`, else 0."""
        return self.speed if self._new_speeds >= _FEWEST_SPEEDS else 0.0

    def speed_told(self) -> None:
        """Takes note that the others have used the speed of this member."""
        self._new_speeds = 0

    @property
    def goodput(self) -> float:
        """Share of the time since the first step that went into steps which were applied, 0 to 1; 0 before that."""
        if self._since is None:
            return 0.0
        until = monotonic() if self._mark is None else self._mark
        return self._useful / (until - self._since) if until > self._since else 0.0

    def add_wait(self, seconds: float) -> None:
        """Adds time for which the calling thread has waited in a collective."""
        self.waited += seconds
        if get_ident() == self._trainer:  # others wait while it computes
            self._trainer_waited += seconds

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def checkpoint_written(self, step: int, seconds: float) -> None:
        """Takes note that a checkpoint of the state after a step is complete, `seconds` after its write began."""
        before = self._checkpoints
        self._checkpoints = _Checkpoints(step, before.written + 1, before.failures, before.seconds + seconds)

    def checkpoint_failed(self) -> None:
        """Takes note that a checkpoint could not be written."""
        self._checkpoints = self._checkpoints._replace(failures=self._checkpoints.failures + 1)

    # What the script says ---------------------------------------------------------------------------------------------

    def log(self, values: Mapping[str, object]) -> None:
        """Keeps the last value of each name; raises ValueError or TypeError for a name or a value that cannot be."""
        logged = self._logged | {_checked_name(name): _checked_value(name, value) for name, value in values.items()}
        if len(logged) > MOST_LOGGED:
            raise ValueError(f"a worker can log at most {MOST_LOGGED} names, not {len(logged)}: {', '.join(logged)}")
        self._logged = logged

    # Bytes ------------------------------------------------------------------------------------------------------------

    def state_received(self, size: int) -> None:
        """Takes note of bytes of training state that have come from another member."""
        self.state_bytes += size

    @contextmanager
    def fetching_state(self) -> Iterator[None]:
        """Counts the time of its block, in which this member fetches training state."""
        began = monotonic()
        try:
            yield
        finally:
            self.state_time += monotonic() - began

    def generation_ended(self, sent: Mapping[str, int]) -> None:
        """Adds what was sent in a generation that is over, in bytes by kind of link."""
        self._sent = _sum(self._sent, sent)

    def read(self, sent: Mapping[str, int]) -> Counters:
        """Returns all counters, none below an earlier answer; `sent` has bytes by kind of link in this generation."""
        # Another thread may be moving to the next generation, or counting, just now.
        told = self._told
        checkpoints = self._checkpoints
        total = _sum(dict.fromkeys(told.sent_bytes, 0) | self._sent, sent)
        self._told = Counters(
            committed=self.committed,
            undone=self.undone,
            samples=self.samples,
            sent_bytes={kind: max(size, told.sent_bytes.get(kind, 0)) for kind, size in total.items()},
            in_collectives=max(self.waited, told.in_collectives),
            checkpoint_step=checkpoints.step,
            checkpoints=checkpoints.written,
            checkpoint_failures=checkpoints.failures,
            checkpoint_time=checkpoints.seconds,
            state_bytes=self.state_bytes,
            state_time=self.state_time,
            speed=self.speed,
            share=self.share,
            total=self.total,
            logged=self._logged,
            operations=self.operations,
        )
        return self._told


def counted_since(start: Counters, now: Counters) -> Counters:
    """Returns what was counted between two calls of `MemberCounters.read`."""
    return replace(
        now,
        committed=now.committed - start.committed,
        undone=now.undone - start.undone,
        samples=now.samples - start.samples,
        sent_bytes={kind: size - start.sent_bytes.get(kind, 0) for kind, size in now.sent_bytes.items()},
        in_collectives=now.in_collectives - start.in_collectives,
        checkpoint_step=now.checkpoint_step if now.checkpoints > start.checkpoints else 0,
        checkpoints=now.checkpoints - start.checkpoints,
        checkpoint_failures=now.checkpoint_failures - start.checkpoint_failures,
        checkpoint_time=now.checkpoint_time - start.checkpoint_time,
        state_bytes=now.state_bytes - start.state_bytes,
        state_time=now.state_time - start.state_time,
        operations=now.operations - start.operations,
    )


def _checked_name(name: str) -> str:
    if not (1 <= len(name.encode()) <= MOST_NAME_BYTES and name.isprintable()):
        raise ValueError(f"the name of a logged value has 1 to {MOST_NAME_BYTES} bytes to print, not {name[:80]!r}")
    return name


def _checked_value(name: str, value: object) -> float:
    try:
        return float(value.item() if hasattr(value, "item") else value)  # type: ignore[arg-type]  # also of a tensor
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's, of several elements
        raise TypeError(f"{name} is no number that can be logged, but {type(value).__name__}") from None


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in {**one, **other}}


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

    `operation` is its number in the group and generation, 0 for messages; `signature` is encoded. `group` is "" for the
    group of all members. `first_rank` is the lowest rank in the view among the group's members, which tells parts of
    one name apart.
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
        """Records that the operation is over, with the type and text of its error; later calls do nothing."""
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
    """The last `capacity` operations of this member, in a ring. Thread-safe without a lock.

    `clock` returns monotonic seconds. `wall` returns seconds since 1970, and is called once for each snapshot.
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
        """Records that an operation was issued (see `Entry` for the arguments), without parsing its signature.

        Returns the record, on which the caller calls `begin` and `end`.
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
