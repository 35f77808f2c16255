"""How long a step's first task keeps its coordinator. The coordinator's answers are given; the signals are real."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli import step_coordinator
from paceline.cli.slurm import SlurmStep
from paceline.errors import CoordinatorUnreachable, PacelineError

STEP = SlurmStep(name="digits", hosts=("127.0.0.1",), task=0, tasks=2, cpus=1, workers=1, port=0)


def answer(members: int) -> Any:
    return SimpleNamespace(members=[None] * members)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The answers to come, which the test writes; the last one must end the wait."""
    answers: list[Any] = []

    def get_job(address: str, job: str, timeout: float) -> Any:
        given = answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given() if callable(given) else given

    monkeypatch.setattr(step_coordinator, "get_job", get_job)
    monkeypatch.setattr(step_coordinator, "_PAUSE_S", 0.0)
    monkeypatch.setenv("PACELINE_TOKEN", "a" * 64)
    return answers


def serve() -> None:
    with step_coordinator.coordinator_of_step(STEP, "digits"):
        pass


def test_it_stays_until_no_worker_is_left(asked: list[Any]) -> None:
    asked += [answer(2), answer(1), answer(0)]
    serve()
    assert not asked


def test_a_slow_answer_does_not_end_it(asked: list[Any]) -> None:
    asked += [answer(2), CoordinatorUnreachable("no coordinator answers (tried for 1.0 s)"), answer(1), answer(0)]
    serve()
    assert not asked


def test_without_such_a_job_it_ends(asked: list[Any]) -> None:
    asked += [PacelineError("there is no job 'digits'"), answer(1)]
    serve()
    assert asked == [answer(1)]


def test_two_sigterms_within_a_second_are_one_and_a_later_one_ends_it(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(step_coordinator, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: None))

    def signalled(at: float) -> Any:
        now[0] = at
        os.kill(os.getpid(), signal.SIGTERM)
        return answer(1)

    asked += [lambda: signalled(100.0), lambda: signalled(100.5), answer(1), lambda: signalled(102.0), answer(1)]
    serve()
    assert asked == [answer(1)]
