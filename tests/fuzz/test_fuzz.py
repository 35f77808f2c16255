"""Each decoder for some seconds under a fuzzer that is guided by coverage."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.targets import TARGETS
from support.needs import missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SECONDS = 1
LEAST_RUNS = 60
"""More than any target has seeds, and fewer than it makes on a machine that is ten times too busy: it did fuzz."""


def test_fuzzing_all_targets_finds_nothing(tmp_path: Path) -> None:
    """One process fuzzes all targets in turn: to instrument the code takes longer than to fuzz."""
    if importlib.util.find_spec("atheris") is None:
        missing("fuzzing", "atheris is not installed: pip install --group fuzz")
    targets = list(TARGETS)
    script, findings, corpus = Path(__file__).with_name("run.py"), tmp_path / "findings", tmp_path / "corpus"
    options = ["--seconds", str(SECONDS), "--findings", str(findings), "--corpus", str(corpus)]
    ended = subprocess.run(
        [sys.executable, str(script), *targets, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=380,
        check=False,
    )
    found = {file.name: file.read_bytes() for file in findings.iterdir()}
    with_findings = [part[-4000:] for part in ended.stdout.split("\n=== ") if "ERROR: libFuzzer" in part]
    assert ended.returncode == 0, "\n".join([str(found), *(with_findings or [ended.stdout[-4000:]])])
    assert not found
    outputs = re.split(r"^=== (\w+)$", ended.stdout, flags=re.MULTILINE)[1:]
    assert outputs[::2] == targets
    for target, output in zip(targets, outputs[1::2], strict=True):
        runs = re.search(r"stat::number_of_executed_units:\s*(\d+)", output)
        assert runs is not None, f"{target}: {output[-4000:]}"
        assert int(runs[1]) >= LEAST_RUNS, f"{target}: {output[-1000:]}"
