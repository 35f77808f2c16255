"""Where members differ: the text names array or part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.elastic.solo import Training
from unit.elastic.test_step_gate import StepRunner

from paceline._elastic.differences import digests_of, where_they_differ
from paceline._elastic.gate import PendingStepWord
from paceline._elastic.step import Step
from paceline.errors import DivergenceError
from paceline_protocol import StepFlag, step_word
from support.parts import at_once, world_of


def shift(training: Training) -> None:
    training.model.bias.data[0] += 1


def average(training: Training) -> None:
    training.optimizer.live_arrays()["weight/mean"][...] = 1


def schedule(training: Training) -> None:
    """A scheduler that was forgotten, and began anew at a newcomer."""
    training.optimizer.lr *= 0.5


def freeze(training: Training) -> None:
    training.model.bias.requires_grad = False


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ([shift], "they differ in model 'bias'"),
        ([average], "they differ in optimizer 'weight/mean'"),
        ([schedule, shift], "they differ in model 'bias', optimizer"),
        ([freeze], "they differ in model"),
        ([], "optimizer.step() ran in the previous step on only some of them"),
    ],
)
def test_divergence_error_says_where_members_differ(change: list[Any], where: str) -> None:
    trainings = [Training(), Training()]
    for one in change:
        one(trainings[1])
    with world_of(2) as groups:

        def open_gate(rank: int) -> None:
            errand = PendingStepWord(groups[rank], step_word(StepFlag(0), 1, rank), 1, with_gradients=False)
            Step(1, 1, groups[rank], trainings[rank].state._core, StepRunner(), errand, rank, 0)._open_gate()  # type: ignore[arg-type]

        errors = at_once([lambda rank=rank: open_gate(rank) for rank in range(2)])
    for error in errors:
        assert isinstance(error, DivergenceError)
        assert str(error) == f"before step 1, members did not hold the same bits: {where}"


def test_a_long_list_of_differing_names_is_shortened() -> None:
    names = [f"model '{n}'" for n in range(9)]
    digests = np.array([np.zeros(9), np.ones(9)], np.uint32)
    assert where_they_differ(names, digests).endswith("model '5' and 3 more")


def test_equal_states_have_equal_digests() -> None:
    assert digests_of(Training().state._core) == digests_of(Training().state._core)
