"""The check of readings of a generation: it refuses those that go back in time, and only those."""

from __future__ import annotations

import random

from support.generations import Reading, going_back


def test_readings_that_overlap_may_differ() -> None:
    assert going_back([Reading("a", 0, 5, 2), Reading("b", 1, 6, 1), Reading("b", 7, 8, 2)]) == []


def test_a_reading_below_an_earlier_one_is_found_across_readers() -> None:
    early, late = Reading("a", 0, 1, 2), Reading("b", 2, 3, 1)
    assert going_back([late, early]) == [(early, late)]


def test_going_back_agrees_with_a_comparison_of_all_pairs() -> None:
    rng = random.Random(3)
    verdicts = []
    for _ in range(2000):
        readings = []
        for _ in range(4):
            began = rng.uniform(0, 10)
            ended = began + rng.choice((0.0, 2.0, 4.0))
            readings.append(Reading("x", began, ended, round(began + rng.uniform(0, 4)) // 3))
        pairs = [(a, b) for a in readings for b in readings if a.ended < b.began and a.generation > b.generation]
        verdicts.append(bool(pairs))
        assert {late for _, late in going_back(readings)} == {late for _, late in pairs}
    assert 100 < sum(verdicts) < 1900
