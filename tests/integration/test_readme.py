"""The README's Python examples run as they stand, alone and among workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

import pytest

from paceline.testing import coordinator

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(code: str, directory: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(directory), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_alone(code: str, tmp_path: Path) -> None:
    run(code, tmp_path)


@pytest.mark.parametrize(
    "code",
    [pytest.param(code, marks=[pytest.mark.slow] if n else []) for n, code in enumerate(EXAMPLES)],
    ids=range(len(EXAMPLES)),
)
def test_three_workers(code: str, tmp_path: Path) -> None:
    with coordinator() as address, ThreadPoolExecutor(3) as pool:
        outputs = list(
            pool.map(lambda _: run(code, tmp_path, PACELINE_COORDINATOR=address, PACELINE_MIN_WORKERS="3"), range(3))
        )
    if "of {session.size}" in code:
        assert sorted(outputs) == [f"rank {rank} of 3: [6. 6. 6.]\n" for rank in range(3)]


STEPPING = [code for code in EXAMPLES if "session.steps" in code]


@pytest.mark.parametrize("code", [STEPPING[0], *(pytest.param(code, marks=pytest.mark.slow) for code in STEPPING[1:])])
def test_one_more_worker_comes_in(code: str, tmp_path: Path) -> None:
    """It executes the same lines, in no view at first."""
    slow = re.sub(r"total=\d+", "total=150", code)
    slow = re.sub(r"\n( +)with step:.*\n", r"\n\1__import__('time').sleep(0.02); print('step', flush=True)\g<0>", slow)
    with coordinator() as address, ExitStack() as stack:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        environment |= {"PACELINE_COORDINATOR": address, "PACELINE_MIN_WORKERS": "2", "PACELINE_MAX_WORKERS": "3"}
        started: list[subprocess.Popen[str]] = []

        def start() -> None:
            command = [sys.executable, "-c", slow]
            process = subprocess.Popen(command, env=environment, stdout=PIPE, stderr=PIPE, text=True)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)

        start()
        start()
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == "step\n"
        start()
        found = [process.communicate(timeout=50) for process in started]
        assert [process.returncode for process in started] == [0, 0, 0], found[-1][1]
        steps = [output.count("step") for output, _ in found]
        assert steps[2] > 10, "it trained with the others"


def test_every_file_that_the_readme_names_is_there() -> None:
    for name in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name
