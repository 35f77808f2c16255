"""`Step.count`: the weight of a rank's samples in a step, where no sampler gives them out."""

from __future__ import annotations

from typing import Any

import pytest

import paceline
from paceline.errors import StepOrderError, UnsupportedOp


class Feed:
    """Gives samples out, and knows where it is."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_count_sets_the_weight_of_the_step_and_the_group() -> None:
    feed = Feed()
    with paceline.join() as session:
        for step in session.steps(paceline.TrainState(data=feed), total=2):
            with step:
                with pytest.raises(UnsupportedOp, match="has no sampler"):
                    _ = step.weight
                step.count(0.25, of=feed)
                assert (step.weight, session.group._core.gradient_weight) == (0.25, 0.25)
                with pytest.raises(
                    StepOrderError, match=f"step {step.number} already has its batch: this Feed gives one"
                ):
                    step.count(0.25, of=feed)
            assert session.group._core.gradient_weight == 1.0
            with pytest.raises(StepOrderError, match=f"step {step.number} is over"):
                step.count(0.25, of=feed)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, r"this Feed is no part of the training state: give it to TrainState\(data=\.\.\., \.\.\.\)"),
        ({"data": Feed(), "sampler": paceline.ElasticSampler(5, 2)}, "has a sampler beside this Feed"),
    ],
)
def test_count_requires_the_only_data_source_of_the_state(parts: dict[str, Any], text: str) -> None:
    with paceline.join() as session:
        for step in session.steps(paceline.TrainState(notes={}, **parts), total=1):
            with step, pytest.raises(UnsupportedOp, match=text):
                step.count(1.0, of=parts.get("data", Feed()))
