"""`Group.shift`: each rank sends an array to one rank and receives that of another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline._group import Group
from paceline.errors import CollectiveMismatch, InvalidRank, SizeMismatch
from paceline.testing import run_ranks


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, 1, 300_000])
def test_each_rank_gets_the_array_of_its_source(world: int, size: int) -> None:
    def rank(group: Group) -> None:
        for by in range(world):
            to, source = (group.rank + by) % world, (group.rank - by) % world
            mine = np.arange(size) + group.rank
            found = group.shift(mine, to, source)
            np.testing.assert_array_equal(found, np.arange(size) + source)
            assert found is not mine
            np.testing.assert_array_equal(mine, np.arange(size) + group.rank)

    run_ranks(world, rank)


def test_ranks_may_be_permuted_in_any_way_and_results_go_into_out() -> None:
    to = [2, 0, 3, 1]

    def rank(group: Group) -> None:
        mine = np.full((2, 3), group.rank, np.float32)
        into = np.empty((2, 3), np.float32)
        work = group.shift(mine, to[group.rank], to.index(group.rank), out=into, label="copies", async_op=True)
        assert work.wait() is into
        assert (into == to.index(group.rank)).all()
        assert group.shift(mine, to[group.rank], to.index(group.rank), out=mine) is mine
        np.testing.assert_array_equal(mine, into)

    run_ranks(4, rank)


def test_one_message_goes_out_and_one_comes_in() -> None:
    def rank(group: Group) -> int:
        before = group.bytes_sent
        group.shift(np.zeros(1000), (group.rank + 1) % 4, (group.rank - 1) % 4)
        return group.bytes_sent - before

    assert all(8000 <= sent < 9000 for sent in run_ranks(4, rank))


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (InvalidRank, lambda g: g.shift(np.zeros(2), 2, 1 - g.rank)),
        (InvalidRank, lambda g: g.shift(np.zeros(2), 1 - g.rank, -1)),
        (InvalidRank, lambda g: g.shift(np.zeros(2), g.rank, 1 - g.rank)),
        (SizeMismatch, lambda g: g.shift(np.zeros(2), 1 - g.rank, 1 - g.rank, out=np.zeros(3))),
        (CollectiveMismatch, lambda g: g.shift(np.zeros(2 + g.rank), 1 - g.rank, 1 - g.rank)),
        (CollectiveMismatch, lambda g: g.shift(np.zeros(2), 1 - g.rank, 1 - g.rank, label=f"of-{g.rank}")),
    ],
)
def test_invalid_arguments_and_mismatches_raise(error: type[Exception], call: Any) -> None:
    def rank(group: Group) -> None:
        with pytest.raises(error):
            call(group)

    run_ranks(2, rank)
