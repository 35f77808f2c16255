"""`paceline demo` as a process: what it promises on the command line."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from support.command import command


def test_demo_json() -> None:
    with command("demo", "--workers", "2", "--json") as demo:
        assert demo.wait() == 0, str(demo)
    result = json.loads(demo.stdout.splitlines()[-1])
    assert set(result) == {
        "accuracy",
        "steps",
        "world_size",
        "generations",
        "recoveries",
        "samples_once",
        "seconds",
    }
    assert result["accuracy"] >= 0.95
    assert result["samples_once"] is True
    assert result["recoveries"] == []
    assert (result["world_size"], result["generations"]) == (2, 1)
    assert result["steps"] > 0
    assert result["seconds"] > 0
    assert "steps per second" in demo.stderr
    assert "Traceback" not in demo.stderr


@pytest.mark.slow
def test_demo_is_the_same_run_with_one_worker_and_with_four() -> None:
    found = {}
    for workers in ("1", "4"):
        with command("demo", "--workers", workers, "--json") as demo:
            assert demo.wait() == 0, str(demo)
        found[workers] = json.loads(demo.stdout.splitlines()[-1])
    assert found["1"]["steps"] == found["4"]["steps"]
    # The same weights but for rounding (1e-4), so the same digits but for one on the edge.
    assert found["1"]["accuracy"] == pytest.approx(found["4"]["accuracy"], abs=0.003)


def test_demo_on_a_terminal_shows_a_picture_and_ctrl_c_ends_it() -> None:
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    # setsid --ctty makes the pty the terminal that ^C acts on, as in a shell.
    demo = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-m", "paceline", "demo", "--workers", "2"],
        stdin=slave, stdout=slave, stderr=slave, env=environment,
    )  # fmt: skip
    os.close(slave)
    shown = b""
    try:
        while b"training" not in shown:
            shown += os.read(master, 65536)
        os.write(master, b"\x03")
        while True:
            try:
                shown += os.read(master, 65536)
            except OSError:  # EIO: nobody holds the other end any more, the workers neither
                break
        assert demo.wait(10) == 130
    finally:
        demo.kill()
        demo.wait()
        os.close(master)
    text = shown.decode()
    assert "paceline demo" in text
    assert "steps/s" in text
    assert "stopping 2 workers" in text
    assert "Traceback" not in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # the cursor is back
