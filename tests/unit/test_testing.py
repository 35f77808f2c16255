"""`run_ranks` tells the cause, names the rank, and leaves no thread behind."""

from __future__ import annotations

import numpy as np
import pytest

from paceline._group import Group
from paceline.testing import run_ranks


def test_results_are_in_rank_order() -> None:
    assert run_ranks(3, lambda group: group.rank * 10) == [0, 10, 20]


def test_the_cause_is_raised_instead_of_its_consequences() -> None:
    def rank(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("mine")
        group.all_reduce(np.ones(3))

    with pytest.raises(KeyError, match="mine") as info:
        run_ranks(3, rank)
    assert info.value.__notes__ == ["raised by rank 1"]


def test_ranks_that_hang_are_named_and_released() -> None:
    seen: list[int] = []

    def rank(group: Group) -> None:
        try:
            group.recv(1 - group.rank)
        finally:
            seen.append(group.rank)

    with pytest.raises(TimeoutError, match="rank-0, rank-1"):
        run_ranks(2, rank, timeout=0.05)
    assert sorted(seen) == [0, 1]
