"""A long training run holds no more memory, threads or files than a short one."""

import gc
import os
import threading
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from paceline._base.work import Work
from paceline._group import Group
from paceline.testing import local_groups
from support.parts import at_once

WORLD = 3
WARM_UP, PART, LONG = 2_000, 1_000, 5_000
"""Collectives of each rank: so many that the flight recorder is full and every program is made, those that are counted
together, and all together."""
GROWTH_BYTES = 25_000
"""In one part."""

X = np.arange(12.0)
LARGE = np.arange(3 * 4096.0)
"""Of 32 KiB for each third: it is lent."""

KINDS: list[Callable[[Group, int, bool], Any]] = [
    lambda group, root, later: group.all_reduce(X, async_op=later),
    lambda group, root, later: group.all_reduce(X, op="mean", order="rank", async_op=later),
    lambda group, root, later: group.all_reduce(LARGE, async_op=later),
    lambda group, root, later: group.reduce(X, root=root, async_op=later),
    lambda group, root, later: group.reduce_scatter(X, async_op=later),
    lambda group, root, later: group.broadcast(X if group.rank == root else None, root=root, async_op=later),
    lambda group, root, later: group.broadcast(LARGE, root=root, async_op=later),
    lambda group, root, later: group.scatter([X] * 3 if group.rank == root else None, root=root, async_op=later),
    lambda group, root, later: group.all_gather(X, async_op=later),
    lambda group, root, later: group.all_gather(X[: group.rank], uneven=True, async_op=later),
    lambda group, root, later: group.gather(X, root=root, async_op=later),
    lambda group, root, later: group.gather(X[: group.rank], root=root, uneven=True, async_op=later),
    lambda group, root, later: group.all_to_all(X, async_op=later),
    lambda group, root, later: group.all_to_all(X, send_counts=[2, 4, 6], async_op=later),
    lambda group, root, later: group.shift(X, (group.rank + 1) % 3, (group.rank - 1) % 3, async_op=later),
    lambda group, root, later: group.barrier(),
    lambda group, root, later: group.all_gather_object({"rank": group.rank}),
    lambda group, root, later: group.average({"a": X, "b": [X]}),
]
"""Every kind of collective, given a root and whether it may be asynchronous."""


def many(groups: list[Group], first: int, last: int) -> None:
    """The collectives of these numbers at every rank, in two groups by turns, every third asynchronous."""

    def run(ours: Group, other: Group) -> None:
        works: list[Work[Any]] = []
        for i in range(first, last):
            group = other if i // len(KINDS) % 2 else ours
            found = KINDS[i % len(KINDS)](group, i // 7 % WORLD, i % 3 == 0)
            if isinstance(found, Work):
                works.append(found)
            if len(works) == 8 or i == last - 1:
                while works:
                    works.pop().wait(20)

    for end in at_once([partial(run, *pair) for pair in zip(groups[:WORLD], groups[WORLD:], strict=True)], 50.0):
        assert end is None, end


def held() -> tuple[int, int, int]:
    """(bytes that Python objects hold, threads, open files)."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0], threading.active_count(), len(os.listdir("/proc/self/fd"))


def growth(groups: list[Group]) -> tuple[int, int, int]:
    """What a part of the long run adds, after the warm-up: the median of all parts.

    What leaks does so in each of them; Python's table of interned strings, of 2 MB, moves in one of them at most.
    """
    tracemalloc.start()
    try:
        many(groups, 0, WARM_UP)
        counts = [held()]
        for first in range(WARM_UP, LONG, PART):
            many(groups, first, first + PART)
            counts.append(held())
    finally:
        tracemalloc.stop()
    nbytes, threads, files = np.median(np.diff(counts, axis=0), axis=0).astype(int).tolist()
    return nbytes, threads, files


@pytest.mark.slow
def test_thousands_of_collectives_leak_no_memory_threads_or_files() -> None:
    view = local_groups(WORLD)
    groups = [*view, *(group.subgroup(range(WORLD), name="other") for group in view)]
    try:
        nbytes, threads, files = growth(groups)
        assert abs(nbytes) < GROWTH_BYTES
        assert (threads, files) == (0, 0)
    finally:
        for group in view:
            group.close()


def test_the_leak_check_detects_growth() -> None:
    """An object that each call leaves behind is too much."""
    kept: list[bytes] = []

    class Hoarder:
        rank, size = 0, 1

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: kept.append(bytes(8))

    hoarders: Any = [Hoarder()] * (2 * WORLD)
    assert growth(hoarders)[0] > GROWTH_BYTES
