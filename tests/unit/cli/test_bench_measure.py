"""What is timed is the collective that the row names, by the schedule that it names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby

import numpy as np
import pytest

from paceline.cli.bench.calls import make_call
from paceline.cli.bench.measure import forced, measure
from paceline.cli.bench.plan import COLLECTIVES, Job
from paceline.collectives.choose import choose
from paceline.group import Group
from paceline.testing import run_ranks

WORLD = 3
SUM, ONE_BY_ONE = [6.0] * 6, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]

RESULTS: dict[str, list[list[float] | None]] = {
    "all_reduce": [SUM, SUM, SUM],
    "reduce": [SUM, None, None],
    "reduce_scatter": [SUM[:2], SUM[:2], SUM[:2]],
    "broadcast": [[1.0] * 6] * 3,
    "scatter": [[1.0] * 2] * 3,
    "all_gather": [ONE_BY_ONE] * 3,
    "gather": [ONE_BY_ONE, None, None],
    "all_to_all": [ONE_BY_ONE] * 3,
    "send_recv": [[3.0] * 6, [1.0] * 6, [2.0] * 6],
    "barrier": [None] * 3,
}


@pytest.mark.parametrize("collective", [name.replace("-", "_") for name in COLLECTIVES])
def test_a_call_is_the_collective_and_can_be_made_again(collective: str) -> None:
    def rank(group: Group) -> list[float] | None:
        call = make_call(group, collective, 0 if collective == "barrier" else 6 * 4)
        call()
        result = call()
        return result.tolist() if isinstance(result, np.ndarray) else None

    assert run_ranks(WORLD, rank) == RESULTS[collective]


def test_schedules_take_turns_and_all_ranks_get_the_slowest_ones_times(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []  # by rank 0

    def make_spied_call(group: Group, collective: str, size: int) -> Callable[[], object]:
        call = make_call(group, collective, size)

        def spied() -> object:
            if group.rank == 0:
                used.append(group.choose(collective, size, group.size).schedule)
            return call()

        return spied

    monkeypatch.setattr("paceline.cli.bench.measure.make_call", make_spied_call)
    names = ["ring", "direct", "bruck"]
    job = Job("all_gather", 24, tuple(names))
    first, *others = run_ranks(WORLD, partial(measure, job=job, budget_s=0.01))
    assert [name for name, _ in first] == names
    assert all(len(times) >= 10 and min(times) > 0 for _, times in first)
    assert others == [first, first]
    assert [name for name, _ in groupby(used)] == names * 11  # once to warm up, then in ten turns
    for name, times in first:
        assert used.count(name) == len(times) + 8  # to warm up, and for the estimate


def test_a_job_without_schedules_says_which_one_was_chosen() -> None:
    def measured(job: Job) -> str | None:
        return run_ranks(2, partial(measure, job=job, budget_s=0.001))[0][0][0]

    assert measured(Job("all_reduce", 4)) == choose("all_reduce", 4, 2).schedule
    assert measured(Job("gather", 8)) == "direct"
    assert measured(Job("send_recv", 4)) is None


def test_a_forced_schedule_counts_within_the_block_only() -> None:
    def rank(group: Group) -> tuple[str, str, str, str]:
        with forced(group, "all_reduce", "ring"):
            inside = group.choose("all_reduce", 4, 2).schedule
            other = group.choose("barrier", 0, 2).schedule
            with forced(group, "barrier", None):
                still = group.choose("all_reduce", 4, 2).schedule
        return inside, other, still, group.choose("all_reduce", 4, 2).schedule

    assert run_ranks(1, rank) == [
        ("ring", choose("barrier", 0, 2).schedule, "ring", choose("all_reduce", 4, 2).schedule)
    ]
