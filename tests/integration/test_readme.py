"""The README's Python examples run as they stand, alone and among workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.testing import coordinator

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_alone(code: str) -> None:
    run(code)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_three_workers(code: str) -> None:
    with coordinator() as address, ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda _: run(code, PACELINE_COORDINATOR=address, PACELINE_MIN_WORKERS="3"), range(3)))
    if "of {session.size}" in code:
        assert sorted(outputs) == [f"rank {rank} of 3: [6. 6. 6.]\n" for rank in range(3)]


def test_every_file_that_the_readme_names_is_there() -> None:
    for name in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name
