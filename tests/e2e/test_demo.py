"""`paceline demo` as a process: what it promises on the command line."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from e2e.terminal import terminal

from support.command import command

FIELDS = {"accuracy", "steps", "world_size", "generations", "recoveries", "samples_once", "seconds"}


def demo(*arguments: str) -> tuple[dict[str, Any], str]:
    """The demo's result, and what it showed meanwhile."""
    with command("demo", "--json", *arguments) as running:
        assert running.wait(100) == 0, str(running)
    result = json.loads(running.stdout.splitlines()[-1])
    assert set(result) == FIELDS
    assert result["accuracy"] >= 0.95
    assert result["samples_once"] is True
    assert running.stdout.count("\n") == 1, "the lines of workers are on standard error"
    assert "all workers ended with the same weights" in running.stderr
    assert result["seconds"] > 0
    assert "steps per second" in running.stderr
    begins = [line for line in running.stderr.splitlines() if "no worker will be killed" not in line]
    assert "the digits" in begins[0], "the first seconds are not silent"
    assert "Traceback" not in running.stderr
    return result, running.stderr


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_the_demo_kills_and_replaces_a_worker() -> None:
    result, shown = demo("--workers", "3")
    assert (result["world_size"], result["generations"]) == (3, 3)  # before the kill, without the killed, with the new
    killed, joined = result["recoveries"]
    assert (killed["cause"], joined["cause"]) == ("killed", "joined")
    assert 0 < killed["recover_ms"] < 10_000
    assert 0 < joined["recover_ms"] < 10_000
    assert "was killed by SIGKILL" in shown
    assert re.search(r"rank 2 was killed in step 40; 2 workers went on after \d+ ms", shown)
    assert re.search(r"a new worker joined; 3 train on after \d+ ms", shown)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_demo_does_not_kill_a_single_worker() -> None:
    result, shown = demo("--workers", "1")
    assert (result["world_size"], result["recoveries"]) == (1, [])
    assert "no worker will be killed" in shown


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_worker_and_three_reach_the_same_bits() -> None:
    with command("demo", "--json", "--same-bits", "--workers", "3") as running:
        assert running.wait(200) == 0, str(running)
    result = json.loads(running.stdout.splitlines()[-1])
    assert [recovery["cause"] for recovery in result["recoveries"]] == ["killed", "joined"]
    many, alone = result["digests"]
    assert re.fullmatch(r"[0-9a-f]{64}", many)
    assert many == alone
    assert f"{alone}  1 worker" in running.stderr
    assert f"{many}  3 workers (1 killed, 1 joined)" in running.stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_killed_worker_does_not_change_the_steps_of_the_demo() -> None:
    alone, calm = demo("--workers", "1", "--kill-at-step", "0")
    assert (alone["generations"], alone["recoveries"]) == (1, [])
    assert "killed" not in calm
    many, shown = demo("--workers", "4", "--kill-at-step", "1")
    assert "rank 3 was killed in step 1;" in shown
    assert alone["steps"] == many["steps"]
    # The same weights but for rounding (1e-4), so the same digits but for one on the edge.
    assert alone["accuracy"] == pytest.approx(many["accuracy"], abs=0.003)


@pytest.mark.slow
@pytest.mark.parametrize(("kill_at_step", "words"), [("0", b"epoch"), ("40", b": 2 workers train")])
@pytest.mark.sampled(2)
def test_ctrl_c_ends_the_demo_on_a_terminal(kill_at_step: str, words: bytes) -> None:
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    # setsid --ctty makes the pty the terminal that ^C acts on, as in a shell.
    process = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-m", "paceline", "demo", "-n", "3", "--kill-at-step", kill_at_step],
        stdin=slave, stdout=slave, stderr=slave, env=environment,
    )  # fmt: skip
    os.close(slave)
    shown = b""
    try:
        while words not in shown:
            shown += os.read(master, 65536)
        os.write(master, b"\x03")
        while True:
            try:
                shown += os.read(master, 65536)
            except OSError:  # EIO: nobody holds the other end any more, the workers neither
                break
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(master)
    text = shown.decode()
    assert "3 workers train" in text
    assert re.search(r"stopping [23] workers", text)  # the new one may be there already
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "key", [pytest.param("\n", id="enter"), pytest.param("\x03", id="ctrl-c", marks=pytest.mark.exhaustive)]
)
@pytest.mark.sampled(1)
def test_the_demo_page_is_served_until_a_key_is_pressed(key: str) -> None:
    with terminal("demo", "-n", "2", "--kill-at-step", "0", "--http") as shown:
        shown.wait_for("the page is served until you press Enter or Ctrl-C", 100)
        # 80 columns: a line that is broken by the program, and not by the terminal, is no link.
        found = re.search(r"the page is at (http://127\.0\.0\.1:\d+/)#token=(\w{64})\s", shown.text)
        assert found is not None, shown.text
        asked = urllib.request.Request(f"{found[1]}api/jobs", headers={"Authorization": f"Bearer {found[2]}"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert [job["name"] for job in json.load(answer)["jobs"]] == ["demo"]
        shown.press(key)
        assert shown.wait() == 0
        assert "Traceback" not in shown.text
