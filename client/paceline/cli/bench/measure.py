"""Times one collective at one size."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from paceline.group import Group

__all__ = ["measure"]

_BUDGET_S = 2.0
"""Aim at this much measuring per size."""

_LEAST, _MOST = 10, 2000
"""Calls per size: enough for a median of large arrays; for small ones, enough for a 99th percentile."""

_WARM_UP = 5


def measure(group: Group, collective: str, size: int) -> list[float]:
    """Seconds of each measured call, the slowest rank's; the same on all ranks.

    Calls follow each other without a pause, as in nccl-tests, for an all_reduce and a barrier make ranks wait for each
    other by themselves. The root of a broadcast would run ahead: there a barrier comes before each call.

    Args:
        group: all ranks call this together.
        collective: "all_reduce", "broadcast" or "barrier".
        size: bytes of the array.
    """
    call = _calls(group, size)[collective]
    separate = collective == "broadcast"
    for _ in range(_WARM_UP):
        call()
    # All ranks must make the same number of calls, so they agree on the slowest one's estimate.
    estimate = float(group.all_reduce(np.array([_time(group, call, separate, 3).max()]), op="max")[0])
    count = int(np.clip(_BUDGET_S / estimate, _LEAST, _MOST))
    times = group.all_reduce(_time(group, call, separate, count), op="max")
    return [float(seconds) for seconds in times]


def _calls(group: Group, size: int) -> dict[str, Callable[[], object]]:
    x = np.full(size // 4, group.rank + 1, np.float32)
    out = group.empty(x.shape, x.dtype)
    return {
        "all_reduce": lambda: group.all_reduce(x, out=out),
        "broadcast": lambda: group.broadcast(x, out=out),
        "barrier": group.barrier,
    }


def _time(
    group: Group, call: Callable[[], object], separate: bool, count: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    times = np.empty(count)
    group.barrier()
    for index in range(count):
        if separate:
            group.barrier()
        start = time.perf_counter()
        call()
        times[index] = time.perf_counter() - start
    return times
