"""What README.md and docs/ tell readers to type runs as it stands, and prints what they show (`support.blocks`)."""

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
from support.blocks import MARK, PAGES, ROOT, Block, Terminal, as_program, blocks, differs, printed_by, scripts
from support.elastic.brake import Brake
from support.ports import free_port

WITH_SCRIPTS = [page for page in PAGES if scripts(page)]
TYPED = [
    page for page in PAGES if any(block.language == "console" and "torch" not in block.flags for block in blocks(page))
]
STEPPING = [
    next(block for block in blocks(ROOT / "docs/tutorials" / name) if "session.steps" in block.code)
    for name in ("elastic.md", "fsdp.md")
]


def name_of(what: Path | Block) -> str:
    return what.where if isinstance(what, Block) else str(what.relative_to(ROOT))


def run(code: str, directory: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        env={**os.environ, "TMPDIR": str(directory), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("page", WITH_SCRIPTS, ids=name_of)
def test_page_scripts_print_the_shown_output_in_one_process(page: Path, tmp_path: Path) -> None:
    """In one process, for most of the time goes into the imports; each prints what the page shows."""
    of_page = scripts(page)
    _, *printed = run(as_program(of_page), tmp_path).split(f"{MARK}\n")
    for block, found in zip(of_page, printed, strict=True):
        expected = printed_by(block)
        assert expected is None or differs(expected, found) is None, f"{block.where}: {differs(expected, found)}"


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SCRIPTS, ids=name_of)
def test_page_scripts_run_in_three_workers(page: Path, tmp_path: Path) -> None:
    program = as_program(scripts(page))
    with coordinator() as address, ThreadPoolExecutor(3) as pool:
        list(
            pool.map(lambda _: run(program, tmp_path, PACELINE_COORDINATOR=address, PACELINE_MIN_WORKERS="3"), range(3))
        )


BEFORE_A_STEP = """
import os as _os, pathlib as _pathlib
from support.elastic.brake import Brake as _Brake

_brake = _Brake(_pathlib.Path(_os.environ["BRAKE"]))

def before_a_step():
    _brake.release(_os.environ["NAME"])  # this worker is there
    _brake.compute(0.02)
    print("step", flush=True)

"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("block", [STEPPING[0], pytest.param(STEPPING[1], marks=pytest.mark.slow)], ids=name_of)
def test_an_extra_worker_joins_the_tutorial_training(block: Block, tmp_path: Path) -> None:
    """It executes the same lines, in no view at first."""
    slow = re.sub(r"total=\d+", "total=60", block.code)
    slow = re.sub(r"\n( +)with step:.*\n", r"\n\1before_a_step()\g<0>", slow)
    slow = BEFORE_A_STEP + slow
    with coordinator() as address, ExitStack() as stack:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        environment |= {"PACELINE_COORDINATOR": address, "PACELINE_MIN_WORKERS": "2", "PACELINE_MAX_WORKERS": "3"}
        Brake(tmp_path / "brake").press("2")  # the others go slowly until the third one is in a step
        environment |= {"PYTHONPATH": str(ROOT / "tests"), "BRAKE": str(tmp_path / "brake")}
        started: list[subprocess.Popen[str]] = []

        def start() -> None:
            command, name = [sys.executable, "-c", slow], str(len(started))
            environment["NAME"] = name
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=PIPE, stderr=PIPE, text=True)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)

        start()
        start()
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == "step\n"
        start()
        found = [process.communicate(timeout=100) for process in started]
        assert [process.returncode for process in started] == [0, 0, 0], found[-1][1]
        steps = [output.count("step") for output, _ in found]
        assert steps[2] > 10, "it trained with the others"


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", TYPED, ids=name_of)
def test_console_commands_of_a_page_print_the_shown_output(page: Path, tmp_path: Path) -> None:
    """From the top of the page to its end, in one folder."""
    with Terminal(tmp_path, {"7400": str(free_port()), "7401": str(free_port())}) as terminal:
        for block in blocks(page):
            if "torch" not in block.flags:
                terminal.show(block)
