"""Defines what is measured, and computes the figures. Pure. W is the world size.

Sizes, values and figures are defined as in nccl-tests (doc/PERFORMANCE.md), so that results can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline._base.arrays import Array
from paceline._collectives.choose import only
from paceline._collectives.schedules import SCHEDULES

COLLECTIVES = (
    "all-reduce",
    "reduce",
    "reduce-scatter",
    "broadcast",
    "scatter",
    "all-gather",
    "gather",
    "all-to-all",
    "send-recv",
    "barrier",
)
"""The collectives that can be measured, as the command line spells them. In send-recv each rank sends to the next."""

ALL = "all"
"""Stands for all collectives, one after the other."""

SEPARATE = frozenset({"reduce", "broadcast", "scatter", "gather", "send_recv"})
"""Collectives that a rank can leave before another has entered, so that successive calls would overlap."""

_PARTED = frozenset({"reduce_scatter", "scatter", "all_gather", "gather", "all_to_all"})
"""Collectives whose whole array consists of W equal parts, one for each rank or from each."""

MEMORIES = ("any", "group")
"""Where the arrays come from: NumPy, or `Group.empty`."""

PLACES = ("usual", "in", "out")
"""Where the sum of an all_reduce goes: where the implementation usually puts it (Paceline and Gloo replace the
argument, Open MPI does not), in place of the argument, or into another array. nccl-tests measures the last two."""

ROOT = 0
"""The root of every collective that has one."""

ELEMENT_BYTES = 4
"""All arrays are float32."""

_BINARY = {f"{letter}{end}": 1 << bits for letter, bits in (("k", 10), ("m", 20), ("g", 30)) for end in ("", "ib")}
_UNITS = {"": 1, "b": 1, **_BINARY, "kb": 10**3, "mb": 10**6, "gb": 10**9}
"""K, M and G alone are powers of 1024, as for nccl-tests and the OSU benchmarks."""


class Job(NamedTuple):
    """A collective at one size, see `measured_size`.

    `collective` is as methods of `Group` spell it; or "send_recv". The schedules are forced in turns; with none the
    chosen one is measured.
    """

    collective: str
    bytes: int
    schedules: tuple[str, ...] = ()
    place: str = "usual"


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One result. The field names are the contract of `--json`.

    Attributes:
        collective: "all_reduce", ..., "send_recv" or "barrier".
        schedule: the schedule that was measured; None for send_recv, which has none, and for other implementations.
        impl: the implementation: "paceline", "gloo" or "openmpi".
        link: the kinds of links that the ranks report: "grpc", or "shm+grpc" for two kinds.
        world_size: W.
        bytes: the size that was measured, see `measured_size`.
        median_us: median time of one call in microseconds. The time of a call is that of its slowest rank. In all
            implementations each rank times the call itself.
        p10_us: 10th percentile.
        p99_us: 99th percentile.
        busbw_GBps: bus bandwidth at the median, 10^9 bytes per second.
    """

    collective: str
    schedule: str | None
    impl: str
    link: str
    world_size: int
    bytes: int
    median_us: float
    p10_us: float
    p99_us: float
    busbw_GBps: float  # the contract has this name, for GB/s

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as `--json` prints it."""
        return asdict(self)


def plan(
    collective: str,
    world: int,
    sizes: str,
    schedule: str | None = None,
    *,
    every_schedule: bool = False,
    place: str = "usual",
) -> list[Job]:
    """Lists the jobs, ordered by collective, then by size; a ValueError lists what is valid.

    A barrier has no size, and ignores `sizes`. `schedule` has names separated by commas; None for the chosen schedule.
    With `every_schedule` only collectives that have schedules are measured, each with all of them.
    """
    if collective not in (*COLLECTIVES, ALL):
        raise ValueError(f"cannot measure {collective!r}: choose one of {', '.join(COLLECTIVES)}, or {ALL}")
    if place not in PLACES:
        raise ValueError(f"--place must be one of {', '.join(PLACES)}, not {place!r}")
    schedules = () if schedule is None else _schedules(collective, schedule)
    wanted = parse_sizes(sizes)
    jobs = []
    for name in COLLECTIVES if collective == ALL else (collective,):
        name = name.replace("-", "_")
        if every_schedule:
            schedules = tuple(SCHEDULES.get(name, ()))
            if not schedules:
                continue
        for size in [0] if name == "barrier" else wanted:
            jobs.append(Job(name, measured_size(name, size, world), schedules, place))
    if not jobs:
        raise ValueError(f"{collective} has no schedules to choose from")
    return jobs


def _schedules(collective: str, text: str) -> tuple[str, ...]:
    if collective == ALL:
        raise ValueError("--schedule needs one collective: name it instead of all")
    name = collective.replace("-", "_")
    if name not in SCHEDULES:
        raise ValueError(f"{collective} has no schedules to choose from")
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        only(name, word)  # raises for an unknown one
    return words


def parse_sizes(text: str) -> list[int]:
    """Parses "1KiB,1MiB,64MiB" to bytes; see `parse_size`."""
    return [parse_size(word) for word in text.split(",")]


def parse_size(text: str) -> int:
    """Parses "64KiB", "64K" or "64kB" to bytes; accepts whole float32 elements only, and more than none."""
    found = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text.strip()!r} is not a size like 64K, 16MiB or 4096")
    size = int(found[1]) * unit
    if size == 0 or size % ELEMENT_BYTES:
        raise ValueError(f"{text.strip()} is not a whole number of float32 elements: a multiple of 4 bytes above 0")
    return size


def size_text(size: int) -> str:
    """Formats 1048576 as "1 MiB"; a size that is not a whole number of KiB stays in bytes."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def measured_size(collective: str, size: int, world: int) -> int:
    """Returns the size in bytes at which a collective is measured, rounded up to W equal parts if its array has parts.

    It is the size of the array that each rank has for all_reduce, reduce, broadcast and send_recv; of a rank's whole
    input for reduce_scatter and all_to_all; of the root's input for scatter; and of the whole result for all_gather and
    gather. A barrier has no size.
    """
    if collective == "barrier":
        return 0
    unit = ELEMENT_BYTES * world if collective in _PARTED else ELEMENT_BYTES
    return -(-size // unit) * unit


def given(rank: int, world: int, *, in_place: bool) -> float:
    """Returns the value of all elements of a rank's input.

    If each call's sum replaces the argument (`in_place`), the values of all ranks add up to 0: then the sums stay 0,
    while other values would overflow.
    """
    return rank - (world - 1) / 2 if in_place else rank + 1.0


def result_parts(collective: str, rank: int, world: int, *, in_place: bool) -> list[float]:
    """Returns the values of the equal parts of a rank's result, in order; empty if the rank gets none."""
    every = [given(other, world, in_place=in_place) for other in range(world)]
    match collective:
        case "all_reduce" | "reduce_scatter":
            return [sum(every)]
        case "all_gather" | "all_to_all":
            return every
        case "reduce":
            return [sum(every)] if rank == ROOT else []
        case "gather":
            return every if rank == ROOT else []
        case "broadcast" | "scatter":
            return [every[ROOT]]
        case "send_recv":
            return [every[(rank - 1) % world]]
        case "barrier":
            return []
    raise ValueError(f"no such collective: {collective}")


def check_result(result: Array | None, parts: list[float]) -> None:
    """Checks that a result is as `result_parts` says, or raises ArithmeticError: its figure would be meaningless."""
    if not parts:
        return
    assert result is not None
    rows = result.reshape(len(parts), -1)
    for part, row in zip(parts, rows, strict=True):
        low, high = float(row.min()), float(row.max())
        if not low == part == high:
            raise ArithmeticError(f"a part of the result lies between {low} and {high}, but should be {part}")


def bus_factor(collective: str, world: int) -> float:
    """Returns the least bytes that any algorithm sends one way on each member's link, for each byte of the size.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    if collective == "all_reduce":
        return 2 * (world - 1) / world
    if collective in _PARTED:
        return (world - 1) / world
    return {"reduce": 1.0, "broadcast": 1.0, "send_recv": 1.0, "barrier": 0.0}[collective]


def bus_bandwidth(collective: str, size: int, seconds: float, world_size: int) -> float:
    """Returns bytes per second times `bus_factor`, which is comparable across world sizes, unlike size / time."""
    return size / seconds * bus_factor(collective, world_size)


def make_row(
    collective: str,
    schedule: str | None,
    link: str,
    world_size: int,
    size: int,
    seconds: Sequence[float],
    impl: str = "paceline",
) -> BenchRow:
    """Makes a row from the times of all measured calls."""
    p10, median, p99 = (float(value) for value in np.percentile(np.asarray(seconds), (10, 50, 99)))
    return BenchRow(
        collective=collective,
        schedule=schedule,
        impl=impl,
        link=link,
        world_size=world_size,
        bytes=size,
        median_us=round(median * 1e6, 1),
        p10_us=round(p10 * 1e6, 1),
        p99_us=round(p99 * 1e6, 1),
        busbw_GBps=round(bus_bandwidth(collective, size, median, world_size) / 1e9, 4),
    )
