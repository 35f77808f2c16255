"""What a command line asks for, as jobs. Pure."""

from __future__ import annotations

from typing import NamedTuple

from paceline.cli.bench.sizes import measured_size, parse_sizes
from paceline.collectives.choose import only
from paceline.collectives.schedules import SCHEDULES

__all__ = ["ALL", "COLLECTIVES", "PLACES", "Job", "plan"]

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
"""What can be measured, as the command line spells it."""

ALL = "all"
"""All of them, one after the other."""

PLACES = ("usual", "in", "out")
"""Where the sum of an all_reduce goes: as is usual with an implementation (Paceline's and Gloo's replace the argument,
Open MPI's do not); in place of the argument; or into another array. nccl-tests measures the last two."""


class Job(NamedTuple):
    """A collective at one size.

    Attributes:
        collective: as methods of `Group` spell it; or "send_recv".
        bytes: the size, see `measured_size`.
        schedules: those to force, turn about; none for the one that is chosen.
        place: one of `PLACES`.
    """

    collective: str
    bytes: int
    schedules: tuple[str, ...] = ()
    place: str = "usual"


def plan(
    collective: str,
    world: int,
    sizes: str,
    schedule: str | None = None,
    *,
    every_schedule: bool = False,
    place: str = "usual",
) -> list[Job]:
    """The jobs, in the order of the collectives, then of the sizes.

    Args:
        collective: one of `COLLECTIVES`, or `ALL`.
        world: number of ranks.
        sizes: as for `parse_sizes`; a barrier has none, and ignores them.
        schedule: names with commas; None for the schedule that is chosen.
        every_schedule: all schedules of each collective, and only collectives that have some.
        place: one of `PLACES`.

    Raises:
        ValueError: there is no such collective, schedule or place, or a size that cannot be; the text says what is.
    """
    if collective not in (*COLLECTIVES, ALL):
        raise ValueError(f"cannot measure {collective!r}: choose one of {', '.join(COLLECTIVES)}, or {ALL}")
    if place not in PLACES:
        raise ValueError(f"there is no place {place!r}: choose one of {', '.join(PLACES)}")
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
        raise ValueError("--schedule is for one collective: name it in place of all")
    name = collective.replace("-", "_")
    if name not in SCHEDULES:
        raise ValueError(f"{collective} has no schedules to choose from")
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        only(name, word)  # raises for one that is not there
    return words
