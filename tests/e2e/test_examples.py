"""The examples, as their first lines say to run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        pytest.param(["full_shard"], 4, marks=pytest.mark.slow),
        pytest.param(["shard_grad_op"], 4, marks=pytest.mark.slow),
        pytest.param(["no_shard"], 1, marks=pytest.mark.slow),
        pytest.param(["hybrid_shard", "2"], 2, marks=pytest.mark.slow),
    ],
)
def test_digits_under_every_strategy(arguments: list[str], parts: int) -> None:
    paceline = [sys.executable, "-m", "paceline", "run", "-n", "4"]
    lines = run(*paceline, str(EXAMPLES / "digits_fsdp.py"), *arguments).splitlines()
    found = [re.search(r"rank (\d) of 4 trains (\d+) parameters, accuracy ([\d.]+)", line) for line in lines]
    ranks = {int(match[1]): (int(match[2]), match[3]) for match in found if match}
    assert len(ranks) == 4
    assert sum(held for held, _ in ranks.values()) == 4 // parts * 17_226  # as many copies as nodes, no element twice
    assert {accuracy for _, accuracy in ranks.values()} == {ranks[0][1]}
    assert float(ranks[0][1]) >= 0.95


@pytest.mark.parametrize("name", ["digits_numpy.py", "digits_fsdp.py"])
def test_alone(name: str) -> None:
    accuracy = re.search(r"accuracy ([\d.]+)(?: on .*)?$", run(sys.executable, str(EXAMPLES / name)).strip())
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.95
