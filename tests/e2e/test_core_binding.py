"""`paceline run` gives each worker its share of the cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.launch._environment import allowed_cores


@pytest.mark.slow
@pytest.mark.skipif(len(allowed_cores()) < 2, reason="one core cannot be shared out")
@pytest.mark.parametrize("bind", ["--bind", "--no-bind"])
def test_workers_get_the_cores_that_the_bind_option_asks_for(bind: str) -> None:
    script = "import os; print(sorted(os.sched_getaffinity(0)))"
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", bind, "-m", "timeit", "-n", "1", "-r", "1", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    told = [line.partition("] ")[2] for line in done.stdout.splitlines() if "[" in line.partition("] ")[2]]
    every = sorted(os.sched_getaffinity(0))
    half = len(every) // 2
    assert sorted(told) == sorted([str(every[:half]), str(every[half:])] if bind == "--bind" else [str(every)] * 2)
