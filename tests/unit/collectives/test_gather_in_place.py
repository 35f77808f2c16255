"""all_gather where the rows already lie in `out`: nothing is copied aside, and only the others' rows are written."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline.testing import run_ranks
from support.worlds import scheduled


@pytest.mark.parametrize("schedule", SCHEDULES["all_gather"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("rows", [0, 1, 7, 20_000])
def test_all_gather_with_rows_already_in_out_gives_all_rows(world: int, rows: int, schedule: str) -> None:
    def rank(group: Group) -> bool:
        group._core.choose = scheduled("all_gather")[schedule]
        full = np.full((world * rows, 2), -1.0)
        mine = full[group.rank * rows : (group.rank + 1) * rows]
        mine[:] = group.rank
        return group.all_gather(mine, out=full) is full and bool(
            (full == np.repeat(np.arange(world), rows)[:, None]).all()
        )

    assert all(run_ranks(world, rank))


def test_rows_that_overlap_their_place_are_read_before_they_are_written() -> None:
    def rank(group: Group) -> list[float]:
        full = np.arange(6.0) + 10 * group.rank
        group.all_gather(full[1:4], out=full)  # one element off its place
        return full.tolist()

    assert run_ranks(2, rank) == [[1, 2, 3, 11, 12, 13]] * 2


def test_all_gather_in_place_allocates_less_than_the_result() -> None:
    n = 1 << 20

    def rank(group: Group) -> int:
        full = np.zeros(2 * n, np.uint8)
        group.barrier()
        if group.rank == 0:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
        group.barrier()
        group.all_gather(full[group.rank * n : (group.rank + 1) * n], out=full)
        group.barrier()
        return tracemalloc.get_traced_memory()[1] - before if group.rank == 0 else 0

    tracemalloc.start()
    try:
        assert run_ranks(2, rank)[0] < n
    finally:
        tracemalloc.stop()
