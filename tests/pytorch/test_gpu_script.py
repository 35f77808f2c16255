"""The script that measures engines on a GPU works: here with Gloo, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu" / "engine_on_gpu.py"


@pytest.mark.parametrize(
    "experiment",
    ["kill", "abort", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("steps", "freeze", "newcomer"))],
)
def test_an_experiment_runs_on_the_cpu(experiment: str) -> None:
    options = ["--device", "cpu", "--engine", "gloo", "--width", "64", "--steps", "12", "--only", experiment]
    command = [sys.executable, str(SCRIPT), *options, "--port", str(free_port())]
    environment = {**os.environ, "PACELINE_FAILURE_TIMEOUT": "30" if experiment != "freeze" else "5"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["experiment"] == experiment
    if experiment == "abort":
        assert all(each is not None and each < 5 for queued in ("1", "2", "8") for each in found[queued]["drained"])
        assert found["8"]["drained"]
    else:
        assert found["same_bits"]
    if experiment in ("kill", "freeze"):
        assert len(found["to_next_step"]) == 1
