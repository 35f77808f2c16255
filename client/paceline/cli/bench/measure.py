"""Times one job on a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from paceline.cli.bench.calls import SEPARATE, make_call
from paceline.cli.bench.plan import Job
from paceline.collectives.choose import choose, only
from paceline.collectives.programs import SCHEDULES
from paceline.group import Group

__all__ = ["BUDGET_S", "forced", "measure"]

BUDGET_S = 2.0
"""Aim at this much measuring for a row."""

_LEAST, _MOST = 10, 2000
"""Calls for a row: enough for a median of large arrays; for small ones, enough for a 99th percentile."""

_WARM_UP = 5

_TURNS = 10
"""How often schedules take turns: often enough that what else the machine does falls on all of them alike."""


def measure(group: Group, job: Job, budget_s: float = BUDGET_S) -> list[tuple[str | None, list[float]]]:
    """Seconds of each measured call, the slowest rank's; the same on all ranks.

    Calls follow each other without a pause, as in nccl-tests, where the collective makes ranks wait for each other by
    itself. The root of a broadcast, say, would run ahead: there a barrier comes before each call, and is not counted.

    Args:
        group: all ranks call this together.
        job: what to measure.
        budget_s: seconds to measure for each schedule, about.

    Returns:
        Name and times for each of the job's schedules; for a job that names none, for the one that is chosen. The name
        is None where a collective has no schedules.
    """
    call, separate = make_call(group, job.collective, job.bytes), job.collective in SEPARATE
    names = job.schedules or (_chosen(group, job),)
    counts = []
    for name in names:
        with forced(group, job.collective, name):
            _time(group, call, separate, _WARM_UP)
            start = time.perf_counter()
            _time(group, call, separate, 3)
            estimate = (time.perf_counter() - start) / 3
        # All ranks must make the same number of calls, so they agree on the slowest one's estimate.
        slowest = float(group.all_reduce(np.array([estimate]), op="max")[0])
        counts.append(int(np.clip(budget_s / slowest, _LEAST, _MOST)))
    turns = _TURNS if len(names) > 1 else 1
    times: list[list[float]] = [[] for _ in names]
    for turn in range(turns):
        for name, count, taken in zip(names, counts, times, strict=True):
            with forced(group, job.collective, name):
                own = _time(group, call, separate, (turn + 1) * count // turns - turn * count // turns)
            taken += (float(seconds) for seconds in group.all_reduce(own, op="max"))
    return list(zip(names, times, strict=True))


@contextmanager
def forced(group: Group, collective: str, schedule: str | None) -> Iterator[None]:
    """Within it a group does a collective by one schedule, whatever the size; None for the one that is chosen.

    All ranks enter it between the same two calls.
    """
    ordinary = group.choose
    if schedule is not None:
        group.choose = partial(choose, rules=only(collective, schedule))
    try:
        yield
    finally:
        group.choose = ordinary


def _chosen(group: Group, job: Job) -> str | None:
    if job.collective not in SCHEDULES:
        return None
    return group.choose(job.collective, job.bytes, group.size).schedule


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
