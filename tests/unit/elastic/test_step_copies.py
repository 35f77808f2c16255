"""`step.keep_copy()`: several updates in one step, with collectives between and behind them; all of them or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.elastic.solo import Training, fail

import paceline
from paceline.errors import PeerLost, StepOrderError, UnsupportedOp

TOTAL = 3


class Two(Training):
    """Two updates in each step, and a collective behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Any = None
        self.between: Any = lambda step: None
        self.behind: Any = lambda step: None

    def train(self, step: Any) -> None:
        step.keep_copy()
        for then in (self.between, self.behind):
            self.compute(step.indices)
            self.optimizer.step()
            if self.group is not None:
                assert self.group.all_reduce(np.ones(1)) == 1
            then(step)


def expected(total: int = TOTAL) -> Any:
    plain = Two()
    for number in range(total):
        for _ in range(2):
            plain.compute(plain.sampler.batch(number))
            plain.optimizer.step()
    return plain


def check(training: Training, total: int = TOTAL) -> None:
    plain = expected(total)
    np.testing.assert_array_equal(training.weights, plain.weights)
    for key, array in training.optimizer.live_arrays().items():
        np.testing.assert_array_equal(array, plain.optimizer.live_arrays()[key])
    assert training.notes["seen"] == 2 * total
    assert training.state.step == total
    assert training.state.is_whole


def test_collectives_after_each_update_are_allowed(session: Any) -> None:
    training = Two()
    training.group = session.group
    training.run(session, TOTAL)
    check(training)
    assert [step.applied for step in training.steps] == [True] * TOTAL


@pytest.mark.parametrize("place", ["between", "behind"])
@pytest.mark.parametrize("swallows", [False, True])
def test_a_failure_after_an_update_undoes_the_step(session: Any, place: str, swallows: bool) -> None:
    training = Two()
    before: list[Any] = []

    def failing(step: Any) -> None:
        if step.number == 2 and step.attempt < 3:
            fail(session)
            try:
                session.group.all_reduce(np.ones(1))
            except PeerLost:
                if not swallows:
                    raise

    def after(step: Any) -> None:
        assert step.applied == (step.number != 2 or step.attempt == 3)
        if step.number == 1:
            before.append(training.state.state_dict())
        elif not step.applied:
            assert isinstance(step.cause, PeerLost)
            assert training.model.weight.grad is None
            assert training.notes["seen"] == 2
            here, there = training.state.state_dict()["parts"], before[0]["parts"]
            np.testing.assert_equal(here, there)

    setattr(training, place, failing)
    training.run(session, TOTAL, after=after)
    assert [(step.number, step.attempt) for step in training.steps] == [(1, 1), (2, 1), (2, 2), (2, 3), (3, 1)]
    check(training)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_raised_by_the_script_undoes_the_step(session: Any, kind: type[BaseException]) -> None:
    training = Two()

    def raising(step: Any) -> None:
        if step.number == 2:
            raise kind("mine")

    training.between = raising
    with pytest.raises(kind, match="mine"):
        training.run(session, TOTAL)
    check(training, 1)
    training.between = lambda step: None
    training.run(session, TOTAL)  # nothing is half changed
    check(training)


@pytest.mark.parametrize("caught", [False, True])
def test_an_interrupted_update_is_undone(session: Any, caught: bool) -> None:
    training = Two()
    update = training.optimizer._update
    calls = []

    def halting(*arguments: Any) -> None:
        update(*arguments)
        calls.append(1)
        if len(calls) == 7:  # of weight and bias, twice in a step: in the second update of the second step
            raise ArithmeticError("half way")

    def inside(step: Any) -> None:
        try:
            training.train(step)
        except ArithmeticError:
            if not caught:
                raise

    training.optimizer._update = halting  # type: ignore[method-assign]
    if caught:
        training.run(session, TOTAL, inside=inside)
        assert [step.applied for step in training.steps] == [True, False, True, True]
    else:
        with pytest.raises(ArithmeticError, match="half way"):
            training.run(session, TOTAL, inside=inside)
        check(training, 1)
        training.run(session, TOTAL)
    check(training)


def test_collectives_after_an_interrupted_update_are_refused(session: Any) -> None:
    """The script has caught the error: the others would apply sums of what it computes from half an update."""
    training = Two()
    update = training.optimizer._update
    broken = [True]

    def halting(*arguments: Any) -> None:
        if broken:
            broken.clear()
            raise ArithmeticError("half way")
        update(*arguments)

    def inside(step: Any) -> None:
        try:
            training.train(step)
        except ArithmeticError:
            with pytest.raises(StepOrderError, match="interrupted half way"):
                session.group.all_reduce(np.ones(1))

    training.optimizer._update = halting  # type: ignore[method-assign]
    training.run(session, TOTAL, inside=inside)
    assert [step.applied for step in training.steps] == [False, True, True, True]
    check(training)


def test_the_error_without_a_copy_suggests_keep_copy(session: Any) -> None:
    training = Training()

    def reduce_behind(step: Any) -> None:
        training.train(step)
        session.group.all_reduce(np.ones(1))

    with pytest.raises(StepOrderError, match=r"session\.retry\(\)\. A step with several updates.*step\.keep_copy\(\)"):
        training.run(session, TOTAL, inside=reduce_behind)


def test_keep_copy_is_refused_outside_the_block_or_after_the_update(session: Any) -> None:
    training = Training()
    for step in session.steps(training.state, total=1):
        with pytest.raises(StepOrderError, match="before the first"):
            step.keep_copy()
        with step:
            step.keep_copy()
            step.keep_copy()
            training.train(step)
            with pytest.raises(StepOrderError, match="before the first"):
                step.keep_copy()
        with pytest.raises(StepOrderError, match="before the first"):
            step.keep_copy()
    assert training.state.step == 1


def test_keep_copy_undoes_updates_of_an_fsdp_no_shard_model(session: Any) -> None:
    module = paceline.nn.Linear(2, 2, rng=np.random.default_rng(0))
    model = paceline.FSDP(module, session.group, paceline.ShardingStrategy.NO_SHARD)
    optimizer = paceline.optim.Adam(model, lr=0.1)
    state = paceline.TrainState(model=model, optimizer=optimizer)
    before = state.state_dict()
    for step in session.steps(state, total=1):
        with step:
            step.keep_copy()
            for _ in range(2):
                optimizer.zero_grad()
                model(np.ones((1, 2), np.float32))
                model.backward(np.ones((1, 2), np.float32))
                optimizer.step()
            if step.attempt == 1:
                fail(session)
        if step.attempt == 1:
            np.testing.assert_equal(state.state_dict(), before)
    assert state.step == 1


def test_keep_copy_of_a_sharded_state_is_refused(session: Any) -> None:
    model = paceline.FSDP(paceline.nn.Linear(2, 2, rng=np.random.default_rng(0)), session.group)
    optimizer = paceline.optim.SGD(model, lr=0.1)
    steps = session.steps(paceline.TrainState(model=model, optimizer=optimizer), total=2)
    with next(steps) as step:
        with pytest.raises(UnsupportedOp, match="has one update, after all its collectives"):
            step.keep_copy()
        model(np.ones((1, 2), np.float32))
        model.backward(np.ones((1, 2), np.float32))
        optimizer.step()
        with pytest.raises(StepOrderError, match=r"after optimizer\.step\(\)") as caught:
            session.group.all_reduce(np.ones(1))
        assert "keep_copy" not in str(caught.value)
    assert step.applied
    steps.close()
