"""`session.batches` in a world of one: the parts of each step, in its block, also after an attempt that was undone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.elastic.solo import Training, fail, undisturbed

from paceline.errors import StepOrderError


class Halves:
    """Gives the samples of a step in two parts; in place of the next ones it calls `fails` once."""

    def __init__(self, fails: Any = None) -> None:
        self.fails = fails

    def parts(self, step: Any) -> list[Any]:
        fails, self.fails = self.fails, None
        if fails is not None:
            fails()
        return [step.indices[: len(step.indices) // 2], step.indices[len(step.indices) // 2 :]]


def test_each_step_is_open_from_its_first_part_to_its_last(session: Any) -> None:
    training, told, taken = Training(), [], []
    batches = session.batches(training.state, Halves(), total=2, seed=7)
    for part in batches:
        with batches.step as step:
            told.append((step.number, batches.is_last, step.applied))
            taken += part.tolist()
            if batches.is_last:
                training.train(step)
        assert step.applied == batches.is_last
    assert told == [(1, False, False), (1, True, False), (2, False, False), (2, True, False)]
    assert taken == [*training.sampler.batch(0).tolist(), *training.sampler.batch(1).tolist()]
    np.testing.assert_array_equal(training.weights, undisturbed(2))


@pytest.mark.parametrize("at", [0, 1])
def test_a_step_that_fails_in_a_part_begins_again_with_its_first_part(session: Any, at: int) -> None:
    training, told = Training(), []
    batches = session.batches(training.state, Halves(), total=2)
    for part in batches:
        with batches.step as step:
            told.append((step.number, step.attempt, len(part)))
            if (step.number, step.attempt) == (2, 1) and batches.is_last == bool(at):
                fail(session)
                session.group.barrier()
            if batches.is_last:
                training.train(step)
    first = [(2, 1, 2)] * (at + 1)
    assert told == [(1, 1, 2), (1, 1, 2), *first, (2, 2, 2), (2, 2, 2)]
    np.testing.assert_array_equal(training.weights, undisturbed(2))


def test_a_failure_while_the_parts_are_read_undoes_the_step(session: Any) -> None:
    def lose_a_peer() -> None:
        fail(session)
        session.group.barrier()

    training, attempts = Training(), []
    batches = session.batches(training.state, Halves(lose_a_peer), total=2)
    for _ in batches:
        with batches.step as step:
            attempts.append((step.number, step.attempt))
            if batches.is_last:
                training.train(step)
    assert attempts == [(1, 2), (1, 2), (2, 1), (2, 1)]
    np.testing.assert_array_equal(training.weights, undisturbed(2))


@pytest.mark.parametrize("where", ["loader", "first part", "last part"])
def test_an_error_of_the_script_is_raised_where_it_happens(session: Any, where: str) -> None:
    def lack() -> None:
        raise LookupError("no such sample")

    def train() -> None:
        for _ in batches:
            with batches.step:
                if where == ("last part" if batches.is_last else "first part"):
                    lack()
            after.append(where)

    training, after = Training(), []
    batches = session.batches(training.state, Halves(lack if where == "loader" else None), total=2)
    with pytest.raises(LookupError, match="no such sample"):
        train()
    assert len(after) == (where == "last part")
    np.testing.assert_array_equal(training.weights, Training().weights)


def test_a_part_that_is_not_used_in_its_step_is_refused(session: Any) -> None:
    batches = session.batches(Training().state, Halves(), total=2)
    next(batches)
    with pytest.raises(StepOrderError, match="a batch was not used in its step: write"):
        next(batches)


def test_a_part_has_one_block(session: Any) -> None:
    batches = session.batches(Training().state, Halves(), total=2)
    with pytest.raises(StepOrderError, match="belongs around the body"), batches.step:
        pass
    next(batches)
    with batches.step:
        pass
    with pytest.raises(StepOrderError, match="belongs around the body"), batches.step:
        pass
