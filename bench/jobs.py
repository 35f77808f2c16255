"""Defines what `compare.py` measures, and computes the figures. Pure. W is the world size.

Sizes, values and figures are defined as in nccl-tests (doc/PERFORMANCE.md), so that results can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline._base.arrays import Array
from paceline._collectives.choose import only
from paceline._collectives.schedules import SCHEDULES
from paceline.cli.sizes import bus_factor, measured_size, parse_sizes

COLLECTIVES = (*(name.replace("_", "-") for name in SCHEDULES if name != "barrier"), "send-recv", "barrier")
"""The collectives that can be measured, as the command line spells them. In send-recv each rank sends to the next."""

ALL = "all"
"""Stands for all collectives, one after the other."""

SEPARATE = frozenset({"reduce", "broadcast", "scatter", "gather", "send_recv"})
"""Collectives that a rank can leave before another has entered, so that successive calls would overlap."""

MEMORIES = ("any", "group")
"""Where the arrays come from: NumPy, or `Group.empty`."""

PLACES = ("usual", "in", "out")
"""Where the sum of an all_reduce goes: where the implementation usually puts it (Paceline and Gloo replace the
argument, Open MPI does not), in place of the argument, or into another array. nccl-tests measures the last two."""

ROOT = 0
"""The root of every collective that has one."""


class Job(NamedTuple):
    """A collective at one size, see `measured_size`.

    Attributes:
        collective: as methods of `Group` spell it; or "send_recv".
        bytes: the size, see `paceline.cli.sizes.measured_size`.
        schedules: the schedules to force in turns; empty for the chosen one.
        place: one of `PLACES`.
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
        bytes: the size that was measured, see `paceline.cli.sizes.measured_size`.
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


def plan(collective: str, world: int, sizes: str, schedule: str | None = None, *, place: str = "usual") -> list[Job]:
    """Lists the jobs, ordered by collective, then by size.

    Args:
        collective: one of `COLLECTIVES`, or `ALL`.
        world: number of ranks.
        sizes: as for `parse_sizes`; a barrier has no size, and ignores them.
        schedule: names separated by commas; None for the chosen schedule.
        place: one of `PLACES`.

    Raises:
        ValueError: there is no such collective, schedule, place or size; the text lists the valid ones.
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
        for size in [0] if name == "barrier" else wanted:
            jobs.append(Job(name, measured_size(name, size, world), schedules, place))
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
        busbw_GBps=round(size / median * bus_factor(collective, world_size) / 1e9, 4),
    )
