"""The image and the compose file: a coordinator and four workers in containers train the digits."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.docker import compose_command, engine

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
IMAGE = "paceline-test"
PROJECT = "paceline-test"
WORKERS = 4


def run(*words: str, timeout: float = 900.0) -> str:
    """Runs a command; returns its output, and shows it if it fails."""
    # Without BuildKit, which not every engine has: the Dockerfile promises to work with both.
    environment = os.environ | {"DOCKER_BUILDKIT": "0", "PACELINE_IMAGE": IMAGE}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-8000:]}{done.stderr[-8000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    with engine():
        run("docker", "build", "-t", IMAGE, "-f", "deploy/Dockerfile", ".")
        yield IMAGE


def test_the_image_runs_the_command_as_nobody_in_particular(image: str) -> None:
    assert re.match(r"\d+\.\d+", run("docker", "run", "--rm", image, "--version"))
    assert run("docker", "run", "--rm", "--entrypoint", "id", image, "-u").strip() != "0"


def test_four_workers_train_the_digits(image: str) -> None:
    compose = [*compose_command(), "-p", PROJECT, "-f", "deploy/compose.yaml"]
    try:
        run(*compose, "up", "-d", "--no-build", "--scale", f"worker={WORKERS}")
        workers = _containers("worker")
        assert len(workers) == WORKERS
        codes = run("docker", "wait", *workers, timeout=180.0).split()
        logs = {worker: _logs(worker) for worker in workers}
        assert codes == ["0"] * WORKERS, logs
        # One worker has rank 0, and says how well it went.
        told = [float(share) for log in logs.values() for share in re.findall(r"\[0\] accuracy (0\.\d+)", log)]
        assert len(told) == 1, logs
        assert told[0] >= 0.95
        (coordinator,) = _containers("coordinator")
        run("docker", "exec", coordinator, "python3", "-m", "paceline.cli.health", "127.0.0.1:7400")
        jobs = run("docker", "exec", coordinator, "paceline", "status", "--coordinator", "127.0.0.1:7400", "--json")
        assert '"name": "digits"' in jobs
        run(*compose, "stop", "-t", "10", "coordinator")
        assert run("docker", "inspect", "-f", "{{.State.ExitCode}}", coordinator).strip() == "0"
        assert "Traceback" not in _logs(coordinator)
    finally:
        run(*compose, "down", "-v", "--remove-orphans")


def _containers(service: str) -> list[str]:
    """By label, for `ps` of Compose v2 leaves out those that have ended."""
    labels = (f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}")
    return run("docker", "ps", "-aq", *(word for label in labels for word in ("--filter", f"label={label}"))).split()


def _logs(container: str) -> str:
    done = subprocess.run(["docker", "logs", container], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
