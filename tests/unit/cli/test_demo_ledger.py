"""Which samples the steps that count were made of."""

from __future__ import annotations

import pytest

from paceline.demo.progress import Ledger

RUN = {"samples": 4, "steps_per_epoch": 2, "total": 2}


def a_run(*, redone: list[int]) -> Ledger:
    """Two steps over four samples by two workers; in the second one a worker dies, and the other redoes it."""
    ledger = Ledger()
    ledger.took(1, 2, [3])
    ledger.took(1, 2, [0])
    ledger.applied(1, 2, 0.5, 1)
    ledger.applied(1, 2, 1.5, 1)
    ledger.took(2, 2, [1])
    ledger.took(2, 2, [2])
    ledger.took(2, 3, redone)
    ledger.applied(2, 3, 4.0, 2)
    return ledger


def test_what_a_killed_worker_took_counts_where_the_others_redid_it() -> None:
    ledger = a_run(redone=[1, 2])
    assert ledger.samples_once(**RUN)
    assert ledger.generations == 2
    assert ledger.mean_loss(range(1, 3)) == pytest.approx((0.5 + 1.5 + 8.0) / 4)


@pytest.mark.parametrize("redone", [[], [1], [1, 1], [1, 2, 2], [1, 3], [1, 4]])
def test_a_sample_that_is_missing_double_or_unknown_is_found(redone: list[int]) -> None:
    assert not a_run(redone=redone).samples_once(**RUN)


def test_the_greatest_generation_counts_whatever_is_heard_first() -> None:
    ledger = a_run(redone=[1, 2])
    ledger.applied(2, 2, 0.0, 1)  # one that applied the step before it heard of the death; the others took it over anew
    assert ledger.samples_once(**RUN)


def test_samples_may_count_although_their_worker_did_not_live_to_say_so() -> None:
    ledger = Ledger()
    ledger.took(1, 2, [0, 1])
    ledger.took(1, 2, [2, 3])
    ledger.applied(1, 2, 1.0, 2)  # by one: then all had entered the step
    assert ledger.samples_once(samples=4, steps_per_epoch=1, total=1)


def test_every_epoch_is_looked_at() -> None:
    ledger = Ledger()
    for step, taken in ((1, [0, 1]), (2, [0, 0])):
        ledger.took(step, 2, taken)
        ledger.applied(step, 2, 1.0, 2)
    assert ledger.samples_once(samples=2, steps_per_epoch=1, total=1)
    assert not ledger.samples_once(samples=2, steps_per_epoch=1, total=2)


def test_a_step_that_nobody_applied_is_missed() -> None:
    ledger = Ledger()
    ledger.took(1, 2, [0])
    assert not ledger.samples_once(samples=1, steps_per_epoch=1, total=1)
    assert ledger.mean_loss(range(1, 2)) is None


@pytest.mark.parametrize("run", [{"total": 0}, {"steps_per_epoch": 0}, {"total": 3}, {"samples": 1 << 62}])
def test_a_run_that_cannot_be_is_no_good_run(run: dict[str, int]) -> None:
    assert not a_run(redone=[1, 2]).samples_once(**(RUN | run))
