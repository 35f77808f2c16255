"""Bus bandwidth, percentiles and rows. Pure. W is the world size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paceline.cli.bench.sizes import PARTED

__all__ = ["Row", "bus_bandwidth", "bus_factor", "make_row"]


@dataclass(frozen=True, slots=True)
class Row:
    """One result; the field names are the command line's contract.

    Attributes:
        collective: "all_reduce", ..., "send_recv" or "barrier".
        schedule: the schedule that was measured; None for send_recv, which has none, and for other implementations.
        impl: whose it is: "paceline", "gloo" or "openmpi".
        link: how bytes moved, as the ranks found it: "grpc", or "shm+grpc" where links were of two kinds.
        world_size: W.
        bytes: the size that was measured, see `measured_size`.
        median_us: median time of one call, microseconds; each call counts as long as its slowest rank took, timed by
            itself at each (`rank.time_calls`), alike in all implementations.
        p10_us: the time that the fastest tenth of calls stays below.
        p99_us: the time that all but a hundredth stay below.
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
    busbw_GBps: float  # the unit is GB/s, and the name is the contract's

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return asdict(self)


def bus_factor(collective: str, world: int) -> float:
    """Bytes that each member's link must carry one way, at least, whatever the algorithm, for each byte of the size.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    if collective == "all_reduce":
        return 2 * (world - 1) / world
    if collective in PARTED:
        return (world - 1) / world
    return {"reduce": 1.0, "broadcast": 1.0, "send_recv": 1.0, "barrier": 0.0}[collective]


def bus_bandwidth(collective: str, size: int, seconds: float, world_size: int) -> float:
    """Bytes per second at `bus_factor`: comparable across world sizes, unlike size / time.

    Args:
        collective: "all_reduce", ..., "send_recv" or "barrier".
        size: bytes, see `measured_size`.
        seconds: time of one call.
        world_size: W.
    """
    return size / seconds * bus_factor(collective, world_size)


def make_row(
    collective: str,
    schedule: str | None,
    link: str,
    world_size: int,
    size: int,
    seconds: Sequence[float],
    impl: str = "paceline",
) -> Row:
    """A row from the times of all measured calls."""
    p10, median, p99 = (float(value) for value in np.percentile(np.asarray(seconds), (10, 50, 99)))
    return Row(
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
