"""A worker alone that stops and begins again: from its checkpoints, or because it was told to go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.elastic.solo import ENVIRONMENT, Training, fail, undisturbed, writing_at_once

import paceline
from paceline import checkpoint
from paceline_protocol import Tag


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)


@pytest.fixture
def session() -> Iterator[Any]:
    with paceline.join() as joined:
        yield joined


def test_a_second_run_resumes_where_the_first_ended(session: Any, tmp_path: Path) -> None:
    with paceline.join() as first:
        Training().run(writing_at_once(first), 5, checkpoint_dir=tmp_path, checkpoint_every=2)
    assert [tag.step for tag in checkpoint.tags(tmp_path)] == [4, 5]
    training = Training()
    training.run(session, 9, checkpoint_dir=tmp_path)
    assert training.notes["seen"] == 9
    np.testing.assert_array_equal(training.weights, undisturbed(9))
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found.tag.step == 9
    assert found.tag.generation > 1, "tags grow with the runs"


def test_a_checkpoint_with_frozen_parameters_logs_a_warning(
    session: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with paceline.join() as first:
        earlier = Training()
        earlier.model.bias.requires_grad = False
        earlier.run(first, 2, checkpoint_dir=tmp_path)
        assert "requires_grad" not in caplog.text
    later = Training()
    later.run(session, 3, checkpoint_dir=tmp_path)
    (told,) = [record for record in caplog.records if "requires_grad" in record.message]
    assert told.levelname == "WARNING"
    assert "step 2 has frozen 1 parameter that the script trains, and trains 0 that it froze" in told.message
    assert "(the first: model 'bias')" in told.message
    assert not later.model.bias.requires_grad


def test_a_crashed_run_resumes_from_the_last_committed_step(session: Any, tmp_path: Path) -> None:
    training = Training()

    def cut(step: Any) -> None:
        if step.number == 4:
            raise ValueError("power cut")

    with paceline.join() as first, pytest.raises(ValueError, match="power cut"):
        training.run(writing_at_once(first), 9, after=cut, checkpoint_dir=tmp_path, checkpoint_every=1)
    assert checkpoint.tags(tmp_path)[-1].step == 3
    resumed = Training()
    numbers = []
    for step in session.steps(resumed.state, total=5, checkpoint_dir=tmp_path):
        with step:
            resumed.compute(step.indices)
            resumed.optimizer.step()
        numbers.append(step.number)
    assert numbers == [4, 5]
    np.testing.assert_array_equal(resumed.weights, undisturbed(5))


def test_a_damaged_checkpoint_is_skipped(session: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with paceline.join() as first:
        Training().run(writing_at_once(first), 5, checkpoint_dir=tmp_path, checkpoint_every=3)
    newest = checkpoint.tags(tmp_path)[-1]
    file = tmp_path / str(newest) / "arrays.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    training = Training().run(session, 6, checkpoint_dir=tmp_path)
    assert f"checkpoint {newest} is left out" in caplog.text
    assert training.notes["seen"] == 6
    np.testing.assert_array_equal(training.weights, undisturbed(6))


def test_a_finished_run_has_no_steps_left(session: Any, tmp_path: Path) -> None:
    with paceline.join() as first:
        Training().run(first, 3, checkpoint_dir=tmp_path)
    again = Training()
    assert list(session.steps(again.state, total=3, checkpoint_dir=tmp_path)) == []
    np.testing.assert_array_equal(again.weights, undisturbed(3))


def test_undone_steps_leave_no_checkpoint(session: Any, tmp_path: Path) -> None:
    training = Training()
    for step in session.steps(training.state, total=4, checkpoint_dir=tmp_path, checkpoint_every=1):
        with step:
            training.compute(step.indices)
            if step.attempt == 1:
                fail(session)
            training.optimizer.step()
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found.state["step"] == 4
    np.testing.assert_array_equal(found.state["parts"]["model"]["arrays"]["weight"], undisturbed(4))


@pytest.mark.parametrize("inside", [True, False])
def test_sigterm_dismisses_the_worker_after_the_step(inside: bool, session: Any, tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    training = Training()

    def told(step: Any) -> None:
        if inside and step.number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        training.train(step)

    def told_between(step: Any) -> None:
        if not inside and step.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(paceline.Dismissed) as caught:
        training.run(session, 9, inside=told, after=told_between, checkpoint_dir=tmp_path)
    assert caught.value.reason == "SIGTERM"
    assert caught.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    last = checkpoint.tags(tmp_path)[-1].step
    assert [step.number for step in training.steps] == list(range(1, last + 1))
    assert last in (3, 4)
    with paceline.join() as second:
        np.testing.assert_array_equal(Training().run(second, 6, checkpoint_dir=tmp_path).weights, undisturbed(6))


def test_generations_continue_after_the_tag_of_the_loaded_checkpoint(session: Any, tmp_path: Path) -> None:
    training = Training()
    training.state.step = 5
    checkpoint.save(tmp_path, training.state.state_dict(), Tag(41, 5))
    again = Training()
    steps = session.steps(again.state, total=7, checkpoint_dir=tmp_path)
    step = next(steps)
    assert (step.number, step.generation) == (6, 42)
    steps.close()
