"""Rules of the loop: what a script does against them is an error in its first steps, and what is legal is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.elastic.fakes import Counter, ForeignModel, ForeignOptimizer, framework
from unit.elastic.solo import Training, fail, undisturbed

import paceline
from paceline._elastic import rules
from paceline._elastic.parts import StatePart
from paceline._elastic.train_state import TrainState
from paceline.errors import StepOrderError


def test_an_optimizer_whose_model_is_not_in_the_state_is_refused(session: Any) -> None:
    training = Training()
    for parts in ({}, {"notes": training.notes}, {"model": Training().model}):
        with pytest.raises(ValueError, match=r"optimizer \(Adam\) trains 2 parameters \(of 2\) .* of shape \[3, 5\]"):
            session.steps(paceline.TrainState(optimizer=training.optimizer, **parts), total=1)
    model = ForeignModel()
    with framework(), pytest.raises(ValueError, match=r"trains 1 parameters \(of 1\) that are in no part"):
        session.steps(paceline.TrainState(optimizer=ForeignOptimizer(model)), total=1)


def test_optimizers_with_parameters_possibly_in_a_part_are_accepted(session: Any) -> None:
    model = ForeignModel()
    with framework():
        for part in (model, {"nested": [model.weight]}, Counter(np.ones(2))):  # the last might have it, for all we know
            session.steps(paceline.TrainState(optimizer=ForeignOptimizer(model), part=part), total=1).close()
            session._line.leave()
    with framework():  # a part of the user's own that says nothing of it
        bare = TrainState(optimizer=ForeignOptimizer(model), part=Own())
        session.steps(bare, total=1).close()
        session._line.leave()
    training = Training()
    arrays = {path: parameter.data for path, parameter in training.model.named_parameters()}
    session.steps(paceline.TrainState(optimizer=training.optimizer, arrays=arrays), total=1).close()


class Own:
    """Gives its part itself, as a custom model would."""

    def as_part(self) -> StatePart:
        return OwnPart()


class OwnPart(StatePart):
    kind = "own"

    def rest(self) -> Any:
        return {}

    def load_rest(self, rest: Any) -> None:
        pass


def shift(training: Training) -> None:
    training.model.weight.data[0, 0] += 1


def replace(training: Training) -> None:
    training.model.weight.data = training.model.weight.data * 2


def note(training: Training) -> None:
    training.notes["seen"] += 1


def skip(training: Training) -> None:
    training.sampler.advance(1)


@pytest.mark.parametrize(
    ("change", "what"), [(shift, "model 'weight'"), (replace, "model 'weight'"), (note, "notes"), (skip, "sampler")]
)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_state_change_between_steps_is_refused(change: Any, what: str, first: int, session: Any) -> None:
    training = Training()

    def after(step: Any) -> None:
        if step.number >= first:
            change(training)

    with pytest.raises(StepOrderError, match=rf"^{what} changed between step {first} and the next one"):
        training.run(session, 9, after=after)
    assert [step.applied for step in training.steps] == [True] * first
    with pytest.raises(StepOrderError, match="half changed"):
        session.steps(training.state, total=9)


@pytest.mark.parametrize("change", [shift, replace])
def test_a_model_change_before_the_update_is_refused(change: Any, session: Any) -> None:
    training = Training()

    def inside(step: Any) -> None:
        change(training)
        training.train(step)

    with pytest.raises(StepOrderError, match=r"^model 'weight' changed in step 1 before optimizer\.step\(\)"):
        training.run(session, 9, inside=inside)
    assert [step.applied for step in training.steps] == [False]
    assert training.state.step == 0
    assert not training.state.is_whole


def test_an_optimizer_that_is_not_in_the_state_is_refused(session: Any) -> None:
    training = Training()
    training.state = paceline.TrainState(model=training.model, sampler=training.sampler)
    with pytest.raises(StepOrderError, match=r"^model 'weight' changed in step 1 .* to the TrainState"):
        training.run(session, 9)


def test_a_model_change_before_the_block_is_refused(session: Any) -> None:
    training = Training()
    for step in session.steps(training.state, total=9):
        shift(training)
        with pytest.raises(StepOrderError, match="model 'weight' changed in step 1"), step:
            training.train(step)
        break


def test_legal_changes_raise_no_error(session: Any) -> None:
    training, averages, group = Training(), {"weight": np.zeros((3, 5))}, session.group
    training.state = paceline.TrainState(
        model=training.model, optimizer=training.optimizer, sampler=training.sampler, averages=averages
    )
    undone = 0
    for step in session.steps(training.state, total=6):
        training.optimizer.lr = 0.1 / step.number
        with step:
            averages["weight"] += 1  # it is put back
            if step.number == 3 and step.attempt == 1:
                fail(session)
            if step.number == 2:
                step.keep_copy()
                shift(training)
            training.train(step)
            averages["weight"] *= training.weights
            shift(training)
        undone += not step.applied
        training.optimizer.lr = 0.1 / (step.number + 1)
        for attempt in session.retry():
            with attempt:
                group.all_reduce(np.ones(1))
                if (step.number, attempt.number) == (1, 1):
                    fail(session)
    assert (training.state.step, undone) == (6, 1)


def test_loading_a_state_between_two_loops_is_allowed(session: Any) -> None:
    saved = Training().run(session, 2).state.state_dict()
    training = Training()
    training.run(session, 1)
    training.state.load_state_dict(saved)
    training.run(session, 4)
    np.testing.assert_array_equal(training.weights, undisturbed(4))


def test_a_change_between_later_steps_of_a_resumed_job_is_not_refused(session: Any) -> None:
    """A replacement, or a start from a checkpoint, finds no fault in a script that has run for long."""
    saved = Training().run(session, 5).state.state_dict()
    training = Training()
    training.state.load_state_dict(saved)

    def after(step: Any) -> None:
        if step.number == 7:
            note(training)  # at the end of an epoch, say

    training.run(session, 9, after=after)
    assert training.state.step == 9


def test_a_dict_of_views_of_the_parameters_is_accepted(session: Any) -> None:
    training = Training()
    arrays = {path: parameter.data[:] for path, parameter in training.model.named_parameters()}
    assert arrays["weight"] is not training.model.weight.data
    session.steps(paceline.TrainState(optimizer=training.optimizer, arrays=arrays), total=1).close()


def test_forget_discards_the_state_of_an_earlier_generation() -> None:
    """It may be that of others by now."""
    training = Training()
    watch = rules.StateWatch(training.state._core)
    watch.begin()
    watch.before_update()
    watch.applied()
    shift(training)
    watch.forget()
    watch.begin()
    shift(training)
    watch.forget()
    watch.before_update()


def test_later_steps_do_not_inspect_arrays(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = rules._arrays_of
    monkeypatch.setattr(rules, "_arrays_of", lambda state: looks.append(state.step) or look(state))
    Training().run(session, 12)
    assert max(looks) == 3
    assert len(looks) <= 10


def test_sampling_detects_a_change_in_one_column(session: Any) -> None:
    """A sample at every 256th place would see some columns only."""
    wide = np.zeros((1024, 1024), np.float32)
    before = rules._sampled(wide)
    wide[:, 77] = 1
    assert rules._sampled(wide) != before
