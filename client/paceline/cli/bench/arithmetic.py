"""Sizes, bus bandwidth and rows. Pure. W is the world size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

__all__ = ["COLLECTIVES", "Row", "bus_bandwidth", "make_row", "parse_sizes", "size_text"]

COLLECTIVES = ("all-reduce", "broadcast", "barrier")
"""What can be measured, as the command line spells it."""

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}

_ELEMENT_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class Row:
    """One result; the field names are the command line's contract.

    Attributes:
        collective: "all_reduce", "broadcast" or "barrier".
        impl: whose it is.
        link: how bytes move.
        world_size: W.
        bytes: size of each rank's array.
        median_us: median time of one call, microseconds; each call counts as long as its slowest rank.
        p10_us: the time that the fastest tenth of calls stays below.
        p99_us: the time that all but a hundredth stay below.
        busbw_GBps: bus bandwidth at the median, 10^9 bytes per second.
    """

    collective: str
    impl: str
    link: str
    world_size: int
    bytes: int
    median_us: float
    p10_us: float
    p99_us: float
    busbw_GBps: float  # the unit is GB/s, and the name is the contract's

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return asdict(self)


def parse_sizes(text: str) -> list[int]:
    """Reads "1KiB,1MiB,64MiB" as bytes; whole float32 elements only.

    Raises:
        ValueError: a size is malformed, not above 0, or not a multiple of 4 bytes.
    """
    sizes = []
    for word in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", word, re.IGNORECASE)
        unit = _UNITS.get(found[2].lower()) if found else None
        if found is None or unit is None:
            raise ValueError(f"{word.strip()!r} is not a size like 1KiB, 16MiB or 4096")
        size = int(found[1]) * unit
        if size == 0 or size % _ELEMENT_BYTES:
            raise ValueError(f"{word.strip()} is not a number of float32 elements: a multiple of 4 bytes above 0")
        sizes.append(size)
    return sizes


def size_text(size: int) -> str:
    """1048576 as "1 MiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def bus_bandwidth(collective: str, size: int, seconds: float, world_size: int) -> float:
    """Bytes per second that each member's link must carry in one direction, at least, whatever the algorithm.

    Comparable across world sizes, unlike size / time. Source: nccl-tests, doc/PERFORMANCE.md.

    Args:
        collective: "all_reduce", "broadcast" or "barrier".
        size: bytes of each rank's array.
        seconds: time of one call.
        world_size: W.
    """
    factor = {"all_reduce": 2 * (world_size - 1) / world_size, "broadcast": 1.0, "barrier": 0.0}[collective]
    return size / seconds * factor


def make_row(collective: str, link: str, world_size: int, size: int, seconds: Sequence[float]) -> Row:
    """A row from the times of all measured calls."""
    p10, median, p99 = (float(value) for value in np.percentile(np.asarray(seconds), (10, 50, 99)))
    return Row(
        collective=collective,
        impl="paceline",
        link=link,
        world_size=world_size,
        bytes=size,
        median_us=round(median * 1e6, 1),
        p10_us=round(p10 * 1e6, 1),
        p99_us=round(p99 * 1e6, 1),
        busbw_GBps=round(bus_bandwidth(collective, size, median, world_size) / 1e9, 4),
    )
