"""Steps that are skipped, and loops that end before their last step, in a world of one."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.elastic.solo import BATCH, ENVIRONMENT, Training

import paceline
from paceline import checkpoint
from paceline._elastic import training_loop
from paceline.errors import StepOrderError, UnsupportedOp

KEPT: list[Any] = []
"""An iterator over steps that outlives its session."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    yield
    KEPT.clear()


@pytest.fixture
def session() -> Iterator[Any]:
    with paceline.join() as joined:
        yield joined


def without(number: int, total: int) -> Any:
    """The weights after all steps but one."""
    training = Training()
    for step in range(total):
        if step + 1 != number:
            training.compute(training.sampler.batch(step))
            training.optimizer.step()
    return training.weights


@pytest.mark.parametrize("call", [True, False])
def test_a_step_without_an_update_is_skipped_and_counted(call: bool, session: Any) -> None:
    training, told = Training(), []
    for step in session.steps(training.state, total=4):
        with step:
            training.compute(step.indices)
            if step.number == 2 and call:
                step.skip()
            if step.number != 2:
                training.optimizer.step()
        told.append((step.number, step.applied, step.skipped))
    assert told == [(number, number != 2, number == 2) for number in (1, 2, 3, 4)]
    np.testing.assert_array_equal(training.weights, without(2, 4))
    counted = session.stats()
    assert (counted["steps"], counted["skipped"], counted["skipped_samples"]) == (4, 1, BATCH)


def test_a_step_of_a_state_without_an_optimizer_is_not_skipped(session: Any) -> None:
    for step in session.steps(paceline.TrainState(notes={"seen": 0}), total=2):
        with step:
            pass
        assert (step.applied, step.skipped) == (True, False)


def test_skip_is_refused_outside_the_block_after_updates_and_for_streams(session: Any) -> None:
    training = Training()
    for step in session.steps(training.state, total=1):
        with pytest.raises(StepOrderError, match="belongs inside"):
            step.skip()
        with step:
            training.train(step)
            with pytest.raises(StepOrderError, match="belongs inside"):
                step.skip()
    stream = {"position": 0}
    for step in session.steps(paceline.TrainState(stream=stream), total=1):
        with step:
            step.count(1.0, of=stream)
            with pytest.raises(UnsupportedOp, match="same batch"):
                step.skip()


@pytest.mark.parametrize(("how", "last"), [("stop", 3), ("break", 2), ("return", 2)])
def test_a_loop_that_ends_early_writes_the_last_checkpoint(how: str, last: int, tmp_path: Path) -> None:
    training = Training()

    def run(session: Any) -> None:
        for number, step in enumerate(session.steps(training.state, total=9, checkpoint_dir=tmp_path), 1):
            with step:
                training.train(step)
            if number == 2 and how == "stop":
                session.stop()
            if number == 2 and how == "break":
                break
            if number == 2 and how == "return":
                return

    with paceline.join() as session:
        run(session)
        with pytest.raises(StepOrderError, match="none is running"):
            session.stop()
    assert training.state.step == last
    assert [tag.step for tag in checkpoint.tags(tmp_path)] == [last]


def leave_wrapped(steps: Any, train: Any) -> None:
    """The script has a generator of its own around the loop."""

    def batches() -> Iterator[Any]:
        for step in steps():
            train(step)
            yield step

    for step in batches():
        if step.number == 2:
            break


def leave_deleted(steps: Any, train: Any) -> None:
    iterator = steps()
    train(next(iterator))
    train(next(iterator))
    del iterator


def leave_at_return(steps: Any, train: Any) -> None:
    iterator = steps()
    for step in iterator:
        train(step)
        if step.number == 2:
            return


def leave_kept(steps: Any, train: Any) -> None:
    KEPT[:] = [steps()]
    for step in KEPT[0]:
        train(step)
        if step.number == 2:
            break


def leave_kept_in_a_step(steps: Any, train: Any) -> None:
    KEPT[:] = [steps()]
    for step in KEPT[0]:
        if step.number == 3:
            break
        train(step)


def leave_and_exit(steps: Any, train: Any) -> None:
    for step in steps():
        train(step)
        if step.number == 2:
            break
    sys.exit(0)


@pytest.mark.parametrize(
    "leave", [leave_wrapped, leave_deleted, leave_at_return, leave_kept, leave_kept_in_a_step, leave_and_exit]
)
def test_leaving_the_loop_early_ends_the_job_with_a_checkpoint(leave: Any, tmp_path: Path) -> None:
    training = Training()

    def train(step: Any) -> None:
        with step:
            training.train(step)

    with contextlib.suppress(SystemExit), paceline.join() as session:
        leave(lambda: session.steps(training.state, total=9, checkpoint_dir=tmp_path), train)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "it no longer makes the worker drain"
    assert [tag.step for tag in checkpoint.tags(tmp_path)] == [2]


def fail_in_wrapper(steps: Any, train: Any) -> None:
    def batches() -> Iterator[Any]:
        for step in steps():
            yield step
            if step.number == 2:
                raise ValueError("it is caught")

    for step in batches():
        train(step)


def fail_around_wrapper(steps: Any, train: Any) -> None:
    for step in (each for each in steps()):
        train(step)
        if step.number == 2:
            raise ValueError("it is caught")


def fail_kept_in_a_step(steps: Any, train: Any) -> None:
    KEPT[:] = [steps()]
    for step in KEPT[0]:
        with step:
            raise ValueError("it is caught")


@pytest.mark.parametrize("fail", [fail_in_wrapper, fail_around_wrapper, fail_kept_in_a_step])
def test_a_caught_error_in_a_wrapped_or_kept_loop_does_not_end_the_job(fail: Any, tmp_path: Path) -> None:
    training = Training()

    def train(step: Any) -> None:
        with step:
            training.train(step)

    with paceline.join() as session, contextlib.suppress(ValueError):
        fail(lambda: session.steps(training.state, total=9, checkpoint_dir=tmp_path), train)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "it no longer makes the worker drain"
    assert checkpoint.tags(tmp_path) == []


def test_session_leave_inside_the_loop_leaves_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, told = Training(), []
    monkeypatch.setattr(training_loop, "tell_of_loop", lambda job, *, unfinished, **_: told.append(unfinished))
    with paceline.join() as session:
        for step in session.steps(training.state, total=9, checkpoint_dir=tmp_path):
            with step:
                training.train(step)
            if step.number == 2:
                session.leave()
                break
    assert checkpoint.tags(tmp_path) == []
    assert told[-1] is False, "it is no loss for the launcher"


@pytest.mark.parametrize("behind", [True, False])
def test_a_caught_error_in_or_after_a_step_does_not_end_the_job(behind: bool, tmp_path: Path) -> None:
    training = Training()

    def inside(step: Any) -> None:
        training.train(step)
        if step.number == 2 and not behind:
            raise ValueError("it is caught")

    def after(step: Any) -> None:
        if step.number == 2 and behind:
            raise ValueError("it is caught")

    with paceline.join() as session, pytest.raises(ValueError, match="caught"):
        training.run(session, 9, inside=inside, after=after, checkpoint_dir=tmp_path)
    assert checkpoint.tags(tmp_path) == []


def test_a_skip_request_is_kept_until_its_step_begins(session: Any) -> None:
    """As after a view with a newcomer: then no exchange has told the others of the request."""
    training, asked = Training(), []
    for step in session.steps(training.state, total=3):
        guard = session._line.guard
        asked.append((step.number, guard.asked[0]))
        with step:
            training.train(step)
        guard.skip_asked(3, "rank 0 called step.skip() in step 3")
    assert asked == [(1, 0), (2, 3), (3, 0)], "it stays until its step begins"
