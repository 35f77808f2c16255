"""What commands do when nobody reads their output, or nobody answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import command

NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    "arguments",
    [
        ("debug", "schedules", "all-reduce", "-n", "20000"),
        ("debug", "schedules", "--json"),
        ("--help",),
        ("run", "-n", "1", "--coordinator", NOWHERE, "SCRIPT"),
    ],
)
def test_a_closed_output_pipe_is_not_an_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("for n in range(50_000): print('line', n)\n")
    words = [str(script) if word == "SCRIPT" else word for word in arguments]
    reads, writes = os.pipe()
    os.close(reads)  # as if `head` had ended at once
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "paceline", *words], stdout=writes, stderr=subprocess.PIPE, text=True, timeout=45
        )
    finally:
        os.close(writes)
    assert ended.stderr == ""
    if arguments[0] == "run":
        assert ended.returncode == 0, "training goes on, and its exit code is the workers'"
    elif arguments[0] == "--help":
        assert ended.returncode == 141, "as if SIGPIPE had ended it"


def test_status_prints_how_long_connecting_will_be_tried() -> None:
    with command("status", "--coordinator", NOWHERE, "--timeout", "5") as ended:
        assert ended.wait() == 1
    told, last = ended.stderr.splitlines()
    assert re.fullmatch(rf"paceline: no coordinator answers at {NOWHERE}; trying for another [1-4] s", told)
    assert last.startswith(f"paceline: no coordinator answers at {NOWHERE} (tried for ")


def test_a_launcher_prints_once_how_long_its_workers_will_try(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import paceline; paceline.join(timeout=6.0)\n")
    with command("run", "-n", "2", "--coordinator", NOWHERE, "--job", "digits", str(script)) as run:
        assert run.wait() == 1
    (told,) = [line for line in run.stderr.splitlines() if "trying for another" in line]  # not one for each worker
    assert re.fullmatch(
        rf"paceline: job 'digits': no coordinator answers at {NOWHERE} yet; trying for another [1-5] s", told
    )
    said = [line for line in run.stderr.splitlines() if " (tried for " in line]
    assert len(said) == 1, f"once, too\n{run.stderr}"
    assert re.fullmatch(
        rf"paceline: no coordinator answers at {NOWHERE} \(tried for \d+\.\d s; .*[Cc]onnection refused.*\): run "
        rf"`paceline coordinator --listen {NOWHERE}` there, or correct the address .*",
        said[0],
    )
    assert "script.py" not in run.stderr, "the worker's own line says nothing about it"


def test_a_token_that_is_not_known_is_said_once_by_a_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import paceline; paceline.join(timeout=6.0)\n")
    with command("coordinator", "--listen", "127.0.0.1:0", PACELINE_TOKEN="good" * 8) as coordinator:
        coordinator.wait_for("listens on")
        found = re.search(r"listens on ([\d.:]+)", coordinator.stderr)
        assert found is not None
        with command("run", "-n", "2", "--coordinator", found[1], str(script), PACELINE_TOKEN="evil" * 8) as run:
            assert run.wait() == 1
    said = [line for line in run.stderr.splitlines() if "ended with exit code" not in line]
    assert len(said) == 1, said
    assert said[0].startswith(f"paceline: the coordinator at {found[1]}: it does not know this token; ")
