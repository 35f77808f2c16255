"""What the notes of the demo's workers prove: samples that count once, equal weights, and how soon the job went on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.demo.ledger import Ledger

END: dict[str, Any] = {
    "digest": "ab",
    "accuracy": 0.97,
    "world_size": 2,
    "steps": 2,
    "steps_per_epoch": 2,
    "samples": 4,
    "seconds": 1.0,
}

Note = dict[str, Any]


def joined(at: float) -> Note:
    return {"joined": True, "at": at}


def took(step: int, generation: int, samples: list[int]) -> Note:
    return {"step": step, "generation": generation, "took": samples, "world": 2, "at": 0.0}


def applied(step: int, generation: int, at: float = 1.0, world: int = 2) -> Note:
    return {"step": step, "generation": generation, "applied": True, "world": world, "at": at}


def a_run(*, redone: list[int], end: Note = END) -> Ledger:
    """Two steps over four samples by two workers; in the second one a worker dies, and the other redoes it."""
    killed = [joined(0.1), took(1, 2, [3]), applied(1, 2), took(2, 2, [1]), {**took(2, 2, []), "killed": 1, "at": 5.0}]
    other = [joined(0.2), took(1, 2, [0]), applied(1, 2), took(2, 2, [2]), took(2, 3, redone), applied(2, 3, 5.04, 1)]
    return Ledger([killed, [*other, {**end, "world_size": 1}]])


def test_samples_of_a_killed_worker_count_where_another_redid_them() -> None:
    ledger = a_run(redone=[1, 2])
    assert ledger.faults() == []
    assert ledger.counts == {1: 2, 2: 3}


@pytest.mark.parametrize("redone", [[], [1], [1, 1], [1, 2, 2], [1, 3], [1, 4]])
def test_a_missing_double_or_unknown_sample_is_found(redone: list[int]) -> None:
    assert a_run(redone=redone).faults() == ["a sample was not used exactly once in every epoch"]


def test_a_step_counts_in_the_greatest_generation_in_which_it_was_applied() -> None:
    """A worker may apply a step before it hears of the death; the others took its samples over anew."""
    early = [joined(0.1), took(1, 2, [0, 1]), applied(1, 2)]
    late = [
        joined(0.1),
        took(1, 2, [2, 3]),
        took(1, 3, [0, 1, 2, 3]),
        applied(1, 3),
        {**END, "steps": 1, "steps_per_epoch": 1},
    ]
    for order in ([early, late], [late, early]):
        assert Ledger(order).counts == {1: 3}
        assert Ledger(order).samples_once()


def test_samples_count_if_their_worker_died_before_noting_the_step() -> None:
    end = {**END, "steps": 1, "steps_per_epoch": 1, "world_size": 1}
    alive = [joined(0.1), took(1, 2, [2, 3]), applied(1, 2), end]  # then all had entered the step
    assert Ledger([[joined(0.1), took(1, 2, [0, 1])], alive]).faults() == []


def test_every_epoch_is_checked() -> None:
    notes = [took(1, 2, [0, 1]), applied(1, 2), took(2, 2, [0, 0]), applied(2, 2)]
    end = {**END, "steps_per_epoch": 1, "samples": 2}
    assert Ledger([[joined(0.1), *notes, {**end, "steps": 1}]]).samples_once()
    assert not Ledger([[joined(0.1), *notes, {**end, "steps": 2}]]).samples_once()


def test_samples_of_a_step_that_no_worker_applied_do_not_count() -> None:
    end = {**END, "steps": 1, "steps_per_epoch": 1, "samples": 1}
    assert not Ledger([[joined(0.1), took(1, 2, [0]), end]]).samples_once()


@pytest.mark.parametrize("ends", [[END], [END, {**END, "digest": "cd"}], [END, END, END]])
def test_weights_must_be_the_same_in_all_members_of_the_last_view(ends: list[Note]) -> None:
    notes = [took(1, 2, [0, 1]), applied(1, 2), took(2, 2, [2, 3]), applied(2, 2)]
    workers = [[joined(0.1), end] for end in ends]
    workers[0][1:1] = notes
    assert Ledger(workers).faults() == ["the workers did not all end with the same weights"]
    workers = [[joined(0.1), *notes, END], [joined(0.1), END]]
    assert Ledger(workers).faults() == []


def test_workers_without_a_result_are_a_fault() -> None:
    assert Ledger([[joined(0.1)], []]).faults() == ["the workers ended without a result"]


def test_recovery_from_a_kill_ends_when_all_survivors_apply_a_step() -> None:
    dead = [joined(0.1), applied(39, 2), {"step": 40, "generation": 2, "killed": 2, "at": 5.0}]
    first = [joined(0.1), applied(39, 2), applied(40, 3, 5.03), applied(41, 3, 5.2)]
    second = [joined(0.1), applied(39, 2), applied(40, 3, 5.04), applied(41, 3, 5.3)]
    (found,) = Ledger([dead, first, second]).recoveries()
    assert (found.cause, round(found.ms)) == ("killed", 40)
    assert found.text == "rank 2 was killed in step 40; 2 workers went on after 40 ms"


def test_a_kill_without_survivors_is_not_counted_as_recovery() -> None:
    dead = [joined(0.1), applied(39, 2), {"step": 40, "generation": 2, "killed": 2, "at": 5.0}]
    assert Ledger([dead, [joined(0.1), applied(39, 2)]]).recoveries() == []


def test_a_newcomer_is_one_that_joined_after_the_first_step() -> None:
    first, second = [joined(0.1), applied(1, 2, 1.0)], [joined(0.2), applied(1, 2, 1.1)]
    new = [joined(6.0), took(9, 4, [0]), applied(9, 4, 6.21, world=3), applied(10, 4, 6.3)]
    late = [joined(7.0)]  # it came when all was over
    (found,) = Ledger([new, late, first, second]).recoveries()
    assert (found.cause, round(found.ms)) == ("joined", 210)
    assert found.text == "a new worker joined; 3 train on after 210 ms"


def test_an_incomplete_line_of_a_killed_worker_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "1").write_text(json.dumps(joined(0.1)) + "\n" + json.dumps(applied(1, 2)) + '\n{"step": 2, "gen')
    (tmp_path / "2").write_text("")
    assert Ledger.read(tmp_path).counts == {1: 2}
