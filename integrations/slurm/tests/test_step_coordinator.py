"""How long a step's first task keeps its coordinator. The coordinator's answers are given; the signals are real."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import CoordinatorUnreachable, PacelineError
from paceline.launch import JobMember, JobStatus
from paceline.launch._own_coordinator import own_addresses
from paceline_slurm._coordinator import _stay, coordinator_of_step
from paceline_slurm._step import SlurmStep
from support.certificates import make_folder
from support.ports import free_port

STEP = SlurmStep(name="digits", hosts=("127.0.0.1",), task=0, tasks=2, cpus=1, workers=1, port=0)


def answer(members: int) -> JobStatus:
    return JobStatus(tuple(JobMember(str(n), n, "n1", 100 + n) for n in range(members)), "running")


class FakeJob:
    """A job whose answers are given; the last one must end the wait.

    Attributes:
        now: the time.
        left: the answers to come.
    """

    def __init__(self, *answers: JobStatus | Exception | Callable[[FakeJob], JobStatus]) -> None:
        self.now = 100.0
        self.left: list[Any] = list(answers)

    def status(self) -> JobStatus:
        given = self.left.pop(0)
        if isinstance(given, Exception):
            raise given
        return given(self) if callable(given) else given


def stay(job: FakeJob) -> list[str]:
    """What is said until the wait has ended."""
    said: list[str] = []
    _stay(job, said.append, clock=lambda: job.now, pause=lambda seconds: None)  # type: ignore[arg-type]
    return said


def test_the_coordinator_stays_until_no_worker_is_left() -> None:
    job = FakeJob(answer(2), answer(1), answer(0))
    assert stay(job) == ["this launcher serves the coordinator until no worker is left in the job (now 2)"]
    assert not job.left


def test_an_unanswered_status_request_does_not_end_the_coordinator() -> None:
    job = FakeJob(answer(2), CoordinatorUnreachable("no coordinator answers"), answer(1), answer(0))
    stay(job)
    assert not job.left


def test_the_coordinator_ends_if_its_job_does_not_exist() -> None:
    job = FakeJob(PacelineError("there is no job 'digits'"), answer(1))
    assert stay(job) == []
    assert job.left == [answer(1)]


def signalled(at: float) -> Callable[[FakeJob], JobStatus]:
    """An answer during which SIGTERM comes."""

    def sent(job: FakeJob) -> JobStatus:
        job.now = at
        os.kill(os.getpid(), signal.SIGTERM)
        return answer(1)

    return sent


def test_only_a_sigterm_more_than_a_second_later_ends_the_coordinator() -> None:
    job = FakeJob(signalled(100.0), signalled(100.5), answer(1), signalled(102.0), answer(1))
    stay(job)
    assert job.left == [answer(1)]


def test_after_a_signal_the_coordinator_ends_at_the_drain_deadline() -> None:
    def later(seconds: float) -> Callable[[FakeJob], JobStatus]:
        def sent(job: FakeJob) -> JobStatus:
            job.now += seconds
            return answer(1)

        return sent

    job = FakeJob(signalled(100.0), later(29.0), later(1.5), answer(1))
    stay(job)
    assert job.left == [answer(1)]


def test_a_task_that_does_not_serve_gets_the_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "a" * 64)
    step = SlurmStep(name="digits", hosts=("n1", "n2"), task=1, tasks=2, cpus=1, workers=1, port=7400)
    said: list[str] = []
    with coordinator_of_step(step, "digits", said.append) as address:
        assert address == "n1:7400"
    assert said == []


def test_the_first_task_of_one_node_serves_on_loopback_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # coordinators of other tests are found elsewhere
    monkeypatch.setenv("PACELINE_TOKEN", "a" * 64)
    port = free_port()
    step = SlurmStep(name="digits", hosts=("n1",), task=0, tasks=2, cpus=1, workers=1, port=port)
    said: list[str] = []
    with coordinator_of_step(step, "digits", said.append) as address:
        assert address == f"127.0.0.1:{port}"
        assert own_addresses() == [address], "paceline status finds it"
        with pytest.raises(ConnectionRefusedError):  # it would answer if the coordinator listened everywhere
            socket.create_connection(("127.0.0.2", port), timeout=5.0)
    assert said == [f"the coordinator of this step listens at 127.0.0.1:{port}"]


def test_certificates_alone_admit_the_tasks_of_several_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    for name, value in make_folder(tmp_path / "certificates").environment.items():
        monkeypatch.setenv(name, value)
    port = free_port()
    step = SlurmStep(name="digits", hosts=("localhost", "n2"), task=0, tasks=2, cpus=1, workers=1, port=port)
    with coordinator_of_step(step, "digits", print) as address:
        assert address == f"localhost:{port}"
        with paceline.join(address, job="digits", min_workers=1) as session:
            assert session.size == 1


def test_a_coordinator_without_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="write export PACELINE_TOKEN"), coordinator_of_step(STEP, "digits", print):
        pass
