"""`session.steps` in a world of one: what a step tells, what counts, what is undone, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from unit.elastic.solo import BATCH, SAMPLES, Training, fail, undisturbed

import paceline
from paceline.errors import PeerLost, StepOrderError, StepVoid, UnsupportedOp


def test_a_step_gives_its_number_batch_and_random_numbers(session: Any) -> None:
    training, told = Training(), []
    for step in session.steps(training.state, total=4, seed=7):
        assert not step.applied
        with step:
            training.compute(step.indices)
            training.optimizer.step()
        assert step.applied
        assert (step.rank, step.world, step.attempt, step.weight, step.lr_scale) == (0, 1, 1, 1.0, 1.0)
        assert step.indices.tolist() == training.sampler.batch(step.number - 1).tolist()
        assert step.rng.random() == np.random.default_rng([7, step.number, 0]).random()
        assert step.rng_for(5).random() != step.rng_for(6).random()
        told.append(step.number)
    assert told == [1, 2, 3, 4]
    assert training.state.step == 4
    assert training.notes["seen"] == 4
    np.testing.assert_array_equal(training.weights, undisturbed(4))


def test_step_repr_shows_number_epoch_place_and_outcome(session: Any) -> None:
    training, shown = Training(), []
    for step in session.steps(training.state, total=4):
        shown.append(repr(step))
        with step:
            shown.append(repr(step))
            training.compute(step.indices)
            if step.number == 1 and step.attempt == 1:
                fail(session)
                session.group.barrier()
            if step.number != 2:
                training.optimizer.step()
        shown.append(repr(step))
    first, second = "<Step 1, epoch 0, rank 0 of 1", "<Step 2, epoch 0, rank 0 of 1"
    assert shown[:3] == [f"{first}, {outcome}>" for outcome in ("not entered", "in its block", "undone")]
    assert shown[3:6] == [f"{first}, attempt 2, {outcome}>" for outcome in ("not entered", "in its block", "applied")]
    assert shown[8] == f"{second}, skipped>"
    assert shown[-1] == "<Step 4, epoch 1, rank 0 of 1, applied>"


def test_training_with_steps_equals_plain_training(session: Any) -> None:
    training, plain = Training().run(session, 7), Training()
    for step in range(7):
        plain.compute(plain.sampler.batch(step))
        plain.optimizer.step()
    np.testing.assert_array_equal(training.weights, plain.weights)


def test_commits_are_announced_once_and_in_order(session: Any) -> None:
    events: list[Any] = []
    session.on_commit(events.append)
    training = Training()
    for step in session.steps(training.state, total=3):
        with step:
            if step.number == 2 and step.attempt == 1:
                fail(session)
            training.compute(step.indices)
            training.optimizer.step()
        events.append(("applied" if step.applied else "undone", step.number))
    assert events == [("applied", 1), ("undone", 2), 1, ("applied", 2), 2, ("applied", 3), 3]


def test_a_failed_step_is_undone_and_retried(session: Any) -> None:
    views: list[int] = []
    session.on_view(lambda: views.append(session.generation))
    training, tried = Training(), []
    for step in session.steps(training.state, total=3):
        with step:
            training.compute(step.indices)
            if step.number == 2 and step.attempt < 3:
                fail(session)
            training.optimizer.step()
        tried.append((step.number, step.attempt, step.applied, step.generation))
        if not step.applied:
            assert isinstance(step.cause, PeerLost)
            assert training.notes["seen"] == 1
            assert training.model.weight.grad is None
    assert tried == [(1, 1, True, 2), (2, 1, False, 2), (2, 2, False, 3), (2, 3, True, 4), (3, 1, True, 4)]
    assert views == [2, 3, 4]
    np.testing.assert_array_equal(training.weights, undisturbed(3))


def test_a_failure_after_the_update_undoes_nothing(session: Any) -> None:
    training, tried = Training(), []
    for step in session.steps(training.state, total=2):
        with step:
            training.compute(step.indices)
            training.optimizer.step()
            if step.number == 1:
                fail(session)
        tried.append((step.number, step.applied))
    assert tried == [(1, True), (2, True)]


def test_a_step_that_fails_five_times_raises_step_void(session: Any) -> None:
    training = Training()

    def failing(step: Any) -> None:
        fail(session, f"loss {step.attempt}")
        training.train(step)

    with pytest.raises(StepVoid, match="step 1 failed 5 times in a row") as caught:
        training.run(session, 2, inside=failing)
    attempts = [step.attempt for step in training.steps]
    assert attempts == [1, 2, 3, 4, 5]
    assert all(f"PeerLost: loss {n}" in str(caught.value) for n in attempts)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, ArithmeticError])
def test_an_error_of_the_script_is_raised_and_undoes_the_step(session: Any, kind: type[BaseException]) -> None:
    training = Training()
    before = training.weights

    def raising(step: Any) -> None:
        training.compute(step.indices)
        raise kind("mine")

    with pytest.raises(kind, match="mine"):
        training.run(session, 2, inside=raising)
    np.testing.assert_array_equal(training.weights, before)
    assert training.notes["seen"] == 0
    assert training.model.weight.grad is None
    assert training.state.step == 0
    training.optimizer.step()  # the gate is gone


def test_an_update_right_after_the_block_is_refused(session: Any) -> None:
    training = Training()

    def behind(step: Any) -> None:
        with pytest.raises(StepOrderError, match=r"outside of a step"):
            training.optimizer.step()

    training.run(session, 3, after=behind)
    np.testing.assert_array_equal(training.weights, undisturbed(3))


def test_a_step_cannot_be_entered_twice(session: Any) -> None:
    training = Training()
    for step in session.steps(training.state, total=2):
        with step:
            training.train(step)
        with pytest.raises(StepOrderError, match=f"step {step.number} was entered before"), step:
            training.train(step)
    np.testing.assert_array_equal(training.weights, undisturbed(2))


def test_an_interrupt_within_the_update_spoils_the_step(session: Any) -> None:
    training = Training()

    def halt(*args: Any) -> None:
        raise KeyboardInterrupt

    training.optimizer._update = halt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        training.run(session, 2)
    (step,) = training.steps
    assert step._spoiled
    assert not step.applied
    assert training.state.step == 0


def test_a_step_without_an_update_is_counted(session: Any) -> None:
    training = Training()
    applied = []
    for step in session.steps(training.state, total=3):
        with step:
            if step.number == 2:
                continue
            training.compute(step.indices)
            training.optimizer.step()
        applied.append(step.applied)
    assert applied == [True, True]
    assert training.state.step == 3


def test_an_update_outside_a_step_is_refused(session: Any) -> None:
    training = Training()
    steps = session.steps(training.state, total=3)
    step = next(steps)
    with pytest.raises(StepOrderError, match=r"outside of a step: call it inside `with step:`"):
        training.optimizer.step()
    with step:
        training.optimizer.step()
        training.optimizer.step()  # two of them are one update
    next(steps)
    with pytest.raises(StepOrderError, match="outside of a step"):
        training.optimizer.step()
    steps.close()


def test_a_second_update_of_a_sharded_state_is_refused(session: Any) -> None:
    """A member that finishes the step of others has one gradient, and runs the optimizer once."""
    model = paceline.FSDP(paceline.nn.Linear(2, 2, rng=np.random.default_rng(0)), session.group)
    optimizer = paceline.optim.SGD(model, lr=0.1)
    state = paceline.TrainState(model=model, optimizer=optimizer)
    steps = session.steps(state, total=3)
    with next(steps) as step:
        model(np.ones((1, 2), np.float32))
        model.backward(np.ones((1, 2), np.float32))
        optimizer.step()
        with pytest.raises(StepOrderError, match=r"optimizer\.step\(\) was called twice in one step"):
            optimizer.step()
    assert step.applied
    steps.close()


def test_a_collective_after_the_update_is_refused(session: Any) -> None:
    training = Training()

    def reduce_behind(step: Any) -> None:
        session.group.all_reduce(np.ones(1))
        training.optimizer.step()
        session.group.all_reduce(np.ones(1))

    with pytest.raises(StepOrderError, match=r"a collective after optimizer\.step\(\)"):
        training.run(session, 3, inside=reduce_behind)
    assert [step.applied for step in training.steps] == [True]


def test_collectives_between_steps_need_a_retry_block(session: Any) -> None:
    """They would go well until somebody is lost."""
    training, group = Training(), session.group

    def refused() -> None:
        for call in (lambda: group.all_reduce(np.ones(2)), group.barrier):
            with pytest.raises(StepOrderError, match=r"between two steps: .* `for attempt in session\.retry\(\)"):
                call()

    group.barrier()
    for step in session.steps(training.state, total=4):
        refused()
        part = group.subgroup([0])  # communicates nothing
        with pytest.raises(StepOrderError, match="between two steps"):
            part.barrier()
        with step:
            part.barrier()
            if step.number == 2 and step.attempt == 1:
                fail(session)
            training.optimizer.step()
        refused()
        for attempt in session.retry():
            refused()
            with attempt:
                assert group.all_reduce(np.ones(2)).tolist() == [1, 1]
                if step.number == 3 and attempt.number == 1:
                    fail(session)
            refused()
        refused()
        if step.number == 3:
            break
    group.barrier()


def test_retry_inside_a_step_does_not_permit_collectives_after_the_update(session: Any) -> None:
    training = Training()
    steps = session.steps(training.state, total=3)
    with next(steps):
        training.optimizer.step()
        attempt = next(session.retry())
        with pytest.raises(StepOrderError, match=r"a collective after optimizer\.step\(\)"), attempt:
            session.group.barrier()
    steps.close()


def test_a_step_that_is_not_entered_is_an_error(session: Any) -> None:
    steps = session.steps(Training().state, total=3)
    next(steps)
    with pytest.raises(StepOrderError, match="step 1 was not entered"):
        next(steps)


def test_code_of_a_step_outside_of_its_block_is_refused_with_the_remedy(session: Any) -> None:
    model = paceline.nn.Linear(2, 2, rng=np.random.default_rng(0))
    ddp = paceline.DDP(model, session.group)
    state = paceline.TrainState(model=ddp, optimizer=paceline.optim.SGD(ddp, lr=0.1))
    steps = session.steps(state, total=1)
    next(steps)
    dy = ddp(np.ones((4, 2), np.float32))
    with pytest.raises(StepOrderError, match="All code of a step belongs inside `with step:`"):
        ddp.backward(dy)
    with pytest.raises(StepOrderError, match="call it inside `with step:`"):
        state._core.given["optimizer"].step()
    steps.close()


def test_a_forgotten_update_is_warned_of_once(session: Any, caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    training.run(session, 3, inside=lambda step: training.compute(step.indices))
    (told,) = [record.getMessage() for record in caplog.records if "optimizer.step()" in record.getMessage()]
    assert told.startswith("all ranks skip step 1, because none called optimizer.step() in its block. If that was not")


def test_a_batch_above_the_samples_is_warned_of(session: Any, caplog: pytest.LogCaptureFixture) -> None:
    Training(paceline.ElasticSampler(SAMPLES, global_batch=SAMPLES)).run(session, 1)
    assert "larger than an epoch" not in caplog.text
    Training(paceline.ElasticSampler(SAMPLES, global_batch=SAMPLES + 1)).run(session, 1)
    assert f"a batch of {SAMPLES + 1} is larger than an epoch of {SAMPLES} samples" in caplog.text


def test_a_second_loop_is_refused_while_one_is_running(session: Any) -> None:
    training = Training()
    steps = session.steps(training.state, total=2)
    next(steps)
    with pytest.raises(StepOrderError, match="running already"):
        session.steps(Training().state, total=2)
    steps.close()


def test_a_second_loop_continues_after_the_first(session: Any) -> None:
    training = Training()
    training.run(session, 2)
    training.run(session, 5)
    assert training.state.step == 5
    np.testing.assert_array_equal(training.weights, undisturbed(5))


def test_a_completed_state_yields_no_steps(session: Any) -> None:
    training = Training()
    training.state.step = 9
    assert list(session.steps(training.state, total=9)) == []


def test_per_rank_batches_in_a_world_of_one(session: Any) -> None:
    training = Training(paceline.ElasticSampler(SAMPLES, per_rank_batch=BATCH))
    sizes = []
    for step in session.steps(training.state, total=4):
        with step:
            assert step.lr_scale == 1.0  # the world's size
            sizes.append(len(step.indices))
    assert sizes == [4, 4, 2, 4]
    assert training.sampler.state_dict() == {"epoch": 1, "offset": 4}


def test_batch_attributes_without_a_sampler_are_refused(session: Any) -> None:
    for step in session.steps(paceline.TrainState(notes={"n": 1}), total=1):
        with step:
            for name in ("indices", "weight", "lr_scale"):
                with pytest.raises(UnsupportedOp, match="no sampler"):
                    getattr(step, name)
    assert step.applied


def test_bad_arguments_are_refused(session: Any) -> None:
    for settings in ({"total": 0}, {"total": 1, "seed": -1}, {"total": 1, "checkpoint_every": 1}):
        with pytest.raises(ValueError, match=r"total must be at least 1|seed must be at least 0|checkpoint_every"):
            session.steps(Training().state, **settings)
    for odd in ("5", 5.0, True, None):
        with pytest.raises(TypeError, match=f"total must be a whole number, not {odd!r}"):
            session.steps(Training().state, total=odd)
    with pytest.raises(UnsupportedOp, match="is a set"):
        session.steps(paceline.TrainState(notes={"n": {1}}), total=1)
    assert Training().run(session, 1).state.step == 1


def test_retry_runs_a_block_again(session: Any) -> None:
    training, numbers, steps = Training(), [], []
    for step in session.steps(training.state, total=3):
        with step:
            training.compute(step.indices)
            training.optimizer.step()
        steps.append((step.number, step.attempt, step.generation))
        for attempt in session.retry():
            with attempt:
                if step.number == 2 and attempt.number < 3:
                    fail(session)
                assert session.group.all_reduce(np.ones(1)) == 1
                numbers.append((step.number, attempt.number))
    assert numbers == [(1, 1), (2, 3), (3, 1)]
    assert steps == [(1, 1, 2), (2, 1, 2), (3, 1, 4)]


def retried(session: Any, block: Callable[[], None]) -> None:
    for attempt in session.retry():
        with attempt:
            block()


def test_retry_raises_an_error_of_the_script(session: Any) -> None:
    def block() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        retried(session, block)


def test_retry_outside_a_loop_raises_the_failure(session: Any) -> None:
    def block() -> None:
        fail(session)
        session.group.all_reduce(np.ones(1))

    with pytest.raises(PeerLost, match="gone"):
        retried(session, block)
