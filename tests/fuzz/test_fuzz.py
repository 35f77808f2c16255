"""Each decoder for some seconds under a fuzzer that is guided by coverage."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.targets import TARGETS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SECONDS = 3
LEAST_RUNS = 500
"""Far fewer than any target makes on a slow machine: it did fuzz, and did not only start."""


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_found(target: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        text = "atheris is not installed: pip install --group fuzz"
        if os.environ.get("REQUIRE_FUZZING") == "1":
            pytest.fail(text)
        pytest.skip(f"{text} (REQUIRE_FUZZING=1 makes this a failure)")
    script, findings, corpus = Path(__file__).with_name("run.py"), tmp_path / "findings", tmp_path / "corpus"
    options = ["--seconds", str(SECONDS), "--findings", str(findings), "--corpus", str(corpus)]
    ended = subprocess.run(
        [sys.executable, str(script), target, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=150,
        check=False,
    )
    found = [file.read_bytes() for file in findings.iterdir()]
    assert ended.returncode == 0, f"{found}\n{ended.stdout[-4000:]}"
    assert not found
    runs = re.search(r"stat::number_of_executed_units:\s*(\d+)", ended.stdout)
    assert runs is not None, ended.stdout[-4000:]
    assert int(runs[1]) >= LEAST_RUNS, ended.stdout[-1000:]
