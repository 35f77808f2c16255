"""The experiments for a GPU work: here with Gloo, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.ports import free_port

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu" / "run.py"
SAMPLED = ("kills", "abort", "links")
OTHERS = (
    "links_kills",
    "carry",
    "fsdp",
    "fsdp_carried",
    "replicas",
    "replicas_carried",
    "sums",
    "digests",
    "freezes",
    "broken",
    "newcomer",
    "gate",
    "step",
)


@pytest.mark.parametrize(
    "experiment", [*SAMPLED, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in OTHERS)]
)
def test_an_experiment_runs_on_the_cpu(experiment: str, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--engine", "gloo", "--width", "64", "--kills", "1", "--freezes", "1"]
    options += ["--pick", experiment, "--limit", "170", "--port", str(free_port()), "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=200, check=False
    )
    assert not done.returncode, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["experiments"][experiment]
    assert "failed" not in found, found
    assert experiment in (tmp_path / "results.md").read_text()
    if experiment == "abort":
        assert all(0 <= each < 5 for queued in (1, 2, 8) for each in found[f"{queued} sums"]["drained"])
    elif experiment in ("kills", "links_kills"):
        assert found["to the next step"]["n"] == 2
    elif experiment in ("links", "fsdp", "replicas", "replicas_carried"):
        assert found["same bits"]
    elif experiment in ("sums", "digests", "fsdp_carried"):
        assert all(world["same bits"] for name, world in found.items() if name.startswith("W="))


def test_an_experiment_over_the_limit_is_reported_as_failed(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--engine", "gloo", "--width", "64", "--pick", "digests", "sums", "--limit", "1.5"]
    command = [sys.executable, str(SCRIPT), *options, "--out", str(tmp_path), "--side-by-side", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert not done.returncode, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["experiments"]
    assert [found[name]["failed"] for name in ("digests", "sums")] == ["not over after 2 s"] * 2
