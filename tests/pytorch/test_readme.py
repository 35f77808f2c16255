"""The README's examples for PyTorch run as they stand, alone and among workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.newest, pytest.mark.timeout(120)]

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
LOOP, REST = re.findall(r"```python torch\n(.*?)```", README, re.DOTALL)


def run(code: str, directory: Path, *launcher: str) -> str:
    (directory / "train.py").write_text(code)
    done = subprocess.run(
        [sys.executable, *launcher, str(directory / "train.py")],
        env={**os.environ, "TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_alone_and_the_checkpoint(tmp_path: Path) -> None:
    """In one process, for it takes seconds to load torch."""
    same_objects = REST.partition("    for step in")[0]
    load = "    state.load_state_dict(paceline.checkpoint.load(runs).state)\n"
    compare = "    assert all(torch.equal(a, torch.load(runs / 'model.pt')[n]) for n, a in net.state_dict().items())\n"
    check_the_rest(run(LOOP + REST + same_objects + load + compare, tmp_path), tmp_path)


def test_the_rest_of_a_training_run_by_two_workers(tmp_path: Path) -> None:
    printed = run(REST, tmp_path, "-m", "paceline", "run", "-n", "2")
    check_the_rest(re.sub(r"^\[\d\] ", "", printed, flags=re.MULTILINE), tmp_path)


def check_the_rest(printed: str, directory: Path) -> None:
    """Each step was logged once; what was exported is the model of the last checkpoint."""
    import torch

    lines = re.findall(r"^(\d+) ([\d.]+)$", printed, re.MULTILINE)
    assert [int(step) for step, _ in lines] == list(range(1, 21)), printed
    assert float(lines[-1][1]) < float(lines[0][1])
    runs = directory / "paceline-torch-runs"
    exported = torch.load(runs / "model.pt", weights_only=True)
    net = torch.nn.Linear(4, 2)
    net.load_state_dict(exported)
    saved = checkpoint.load(runs)
    assert saved is not None
    for name, array in saved.state["parts"]["model"]["arrays"].items():
        assert torch.equal(exported[name], torch.from_numpy(array))
