"""What a command line asks for, as jobs. Pure."""

from __future__ import annotations

from typing import NamedTuple, Self

from paceline.cli.bench.sizes import measured_size, parse_sizes
from paceline.collectives.choose import only
from paceline.collectives.programs import SCHEDULES

__all__ = ["ALL", "COLLECTIVES", "Job", "plan"]

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


class Job(NamedTuple):
    """A collective at one size.

    Attributes:
        collective: as methods of `Group` spell it; or "send_recv".
        bytes: the size, see `measured_size`.
        schedules: those to force, turn about; none for the one that is chosen.
    """

    collective: str
    bytes: int
    schedules: tuple[str, ...] = ()

    def to_argument(self) -> str:
        """The job as an argument of a worker: "all_reduce:1024:star,ring"."""
        return f"{self.collective}:{self.bytes}:{','.join(self.schedules)}"

    @classmethod
    def from_argument(cls, argument: str) -> Self:
        """The inverse of `to_argument`."""
        collective, size, schedules = argument.split(":")
        return cls(collective, int(size), tuple(schedules.split(",")) if schedules else ())


def plan(collective: str, world: int, sizes: str, schedule: str | None = None) -> list[Job]:
    """The jobs, in the order of the collectives, then of the sizes.

    Args:
        collective: one of `COLLECTIVES`, or `ALL`.
        world: number of ranks.
        sizes: as for `parse_sizes`; a barrier has none, and ignores them.
        schedule: names with commas; None for the schedule that is chosen.

    Raises:
        ValueError: there is no such collective or schedule, or a size that cannot be; the text says what there is.
    """
    if collective not in (*COLLECTIVES, ALL):
        raise ValueError(f"cannot measure {collective!r}: choose one of {', '.join(COLLECTIVES)}, or {ALL}")
    schedules = () if schedule is None else _schedules(collective, schedule)
    wanted = parse_sizes(sizes)
    jobs = []
    for name in COLLECTIVES if collective == ALL else (collective,):
        name = name.replace("-", "_")
        for size in [0] if name == "barrier" else wanted:
            jobs.append(Job(name, measured_size(name, size, world), schedules))
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
