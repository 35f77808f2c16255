"""The course of a job is kept from its beginning, in a bounded number of points."""

from __future__ import annotations

import math

import pytest

from paceline_server.history import FIRST_INTERVAL_S, MOST_COLUMNS, MOST_POINTS, History, history_as_dict


def run_for(history: History, seconds: float, **values: float) -> None:
    """Adds a point whenever one is due, ten times a second."""
    start = history.times[-1] if history.times else 0.0
    for number in range(round(10 * seconds)):
        now = start + number / 10
        if history.is_due(now):
            history.add(now, {"step": 10 * now, **values})


@pytest.mark.parametrize("seconds", [60, 600, 6000])
def test_points_cover_the_whole_run_evenly(seconds: int) -> None:
    history = History()
    run_for(history, seconds)
    assert MOST_POINTS / 3 < len(history.times) <= MOST_POINTS
    assert history.times[0] == 0.0
    assert history.times[-1] >= seconds - 2 * seconds / (MOST_POINTS / 2)
    gaps = [later - earlier for earlier, later in zip(history.times, history.times[1:], strict=False)]
    assert max(gaps) <= 2.5 * min(gaps)
    assert min(gaps) >= FIRST_INTERVAL_S - 1e-9
    assert list(history.columns["step"]) == [10 * at for at in history.times]


def test_a_value_that_comes_later_has_gaps_before() -> None:
    history = History()
    history.add(0.0, {"step": 1, "sent_bytes/shm": 5})
    history.add(1.0, {"step": 2, "logged/val/loss": 0.5})
    history.add(2.0, {"step": 3, "logged/val/loss": math.nan})
    assert history_as_dict(history, lambda at: 1000 + at) == {
        "at": [1000, 1001, 1002],
        "step": [1, 2, 3],
        "sent_bytes": {"shm": [5, None, None]},
        "logged": {"val/loss": [None, 0.5, None]},
    }


def test_members_cannot_add_columns_without_end() -> None:
    history = History()
    for number in range(1000):
        history.add(number, {"step": 1, f"logged/{number}": 1.0})
    assert len(history.columns) == MOST_COLUMNS
    assert len(history.times) <= MOST_POINTS
