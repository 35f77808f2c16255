"""`paceline run` with scripts that join: views across launchers, deaths, and what is said about them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from e2e.terminal import terminal

from support.command import Command, command, wait_until_gone

SUM = """
import sys
import numpy as np
import paceline

with paceline.join() as session:
    total = session.group.all_reduce(np.array([session.rank + 1]))
    print("rank", session.rank, "of", session.size, "sum", int(total[0]), *sys.argv[1:])
"""

LOOP = """
import os
import numpy as np
import paceline

with paceline.join() as session:
    group = session.group
    group.all_reduce(np.ones(4))
    print("in the loop", session.rank, os.getpid())
    while True:
        group.all_reduce(np.ones(1000))
"""


@pytest.fixture
def loop(tmp_path: Path) -> str:
    (tmp_path / "loop.py").write_text(LOOP)
    return str(tmp_path / "loop.py")


@pytest.fixture
def summing(tmp_path: Path) -> str:
    (tmp_path / "sum.py").write_text(SUM)
    return str(tmp_path / "sum.py")


def pids(run: Command) -> dict[int, int]:
    return {int(rank): int(pid) for rank, pid in re.findall(r"in the loop (\d+) (\d+)", run.stdout)}


def address_of(coordinator: Command) -> str:
    coordinator.wait_for("listens on")
    found = re.search(r"listens on (\S+)", coordinator.stderr)
    assert found is not None
    return found[1]


def test_workers_meet_at_an_embedded_coordinator_with_rank_prefixes(summing: str) -> None:
    with command("run", "-n", "3", summing, "--lr", "0.1") as run:
        assert run.wait() == 0, str(run)
    assert sorted(run.stdout.splitlines()) == [f"[{r}] rank {r} of 3 sum 6 --lr 0.1" for r in range(3)]
    assert run.complaints == ""


@pytest.mark.slow
def test_two_launchers_meet_in_one_job(summing: str) -> None:
    with command("coordinator", "--listen", "127.0.0.1:0") as coordinator:
        where = ("--coordinator", address_of(coordinator), "--job", "digits")
        with (
            command("run", "-n", "2", "--min", "4", *where, summing) as one,
            command("run", "-n", "2", "--min", "4", *where, summing) as two,
        ):
            assert (one.wait(), two.wait()) == (0, 0), f"{one}{two}"
        lines = sorted((one.stdout + two.stdout).splitlines())
        assert lines == [f"[{r}] rank {r} of 4 sum 10" for r in range(4)]
        coordinator.signal(signal.SIGTERM)
        assert coordinator.wait() == 0
        assert "Traceback" not in coordinator.stderr


def test_a_killed_worker_is_named_by_the_launcher_and_all_workers(loop: str) -> None:
    # If its silence were what the others notice, they would not end within the time that is waited for here.
    with command("run", "-n", "3", loop, PACELINE_FAILURE_TIMEOUT="300") as run:
        run.wait_for("in the loop", 3)
        victim = pids(run)[1]
        os.kill(victim, signal.SIGKILL)
        assert run.wait() == 137, str(run)
    lines = run.stderr.splitlines()
    assert f"paceline: rank 1 (pid {victim}) was killed by SIGKILL" in lines
    script = Path(loop).read_text().splitlines()
    for rank in (0, 2):
        told = [line for line in lines if line.startswith(f"[{rank}]")]
        assert told[0].startswith(f"[{rank}] paceline: rank 1 ({socket.gethostname()}, pid {victim}) "), str(run)
        number = script.index("        group.all_reduce(np.ones(1000))") + 1
        assert told[1] == f'[{rank}]   File "{loop}", line {number}, in <module>'
        assert told[2] == f"[{rank}]     group.all_reduce(np.ones(1000))"
        assert told[3].startswith(f"[{rank}]   PeerLost in ")
        assert len(told) == 4
    assert "Traceback" not in run.stderr


def test_a_worker_that_exits_with_an_error_is_named(tmp_path: Path) -> None:
    script = tmp_path / "raise.py"
    script.write_text(LOOP.replace("    while True:", "    if session.rank == 1: sys.exit(5)\n    while True:", 1))
    script.write_text("import sys\n" + script.read_text())
    with command("run", "-n", "2", str(script)) as run:
        assert run.wait() == 5, str(run)
    assert re.search(r"paceline: rank 1 \(pid \d+\) ended with exit code 5", run.stderr), str(run)
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_sigint_and_sigterm_leave_no_orphan_and_no_stack_trace(loop: str, signum: signal.Signals, code: int) -> None:
    with command("run", "-n", "3", loop) as run:
        run.wait_for("in the loop", 3)
        run.signal(signum)
        assert run.wait() == code, str(run)
        wait_until_gone(list(pids(run).values()))
    assert run.complaints == "paceline: stopping 3 workers\n"


def test_ctrl_c_causes_no_complaint_about_a_worker_that_ended_first(loop: str, tmp_path: Path) -> None:
    """A launcher that has to wait for a core between two signals: no worker complains of one that went before it."""
    slow = "import os, time\nkillpg = os.killpg\nos.killpg = lambda *args: (killpg(*args), time.sleep(0.2))\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    with command("run", "-n", "3", loop, PYTHONPATH=str(tmp_path)) as run:
        run.wait_for("in the loop", 3)
        run.signal(signal.SIGINT)
        assert run.wait() == 130, str(run)
    assert run.complaints == "paceline: stopping 3 workers\n"


@pytest.mark.slow
def test_ctrl_c_ends_a_launcher_whose_worker_waits_for_others(summing: str) -> None:
    with (
        command("coordinator", "--listen", "127.0.0.1:0") as coordinator,
        command("run", "-n", "1", "--min", "2", "--coordinator", address_of(coordinator), summing) as run,
    ):
        status = ("status", "--coordinator", address_of(coordinator), "--json")
        deadline = time.monotonic() + 20
        while not (jobs := _json(*status)["jobs"]) or not jobs[0]["waiting"]:
            assert time.monotonic() < deadline, str(run)
        assert jobs[0]["name"] == "default"
        assert jobs[0]["phase"] == "waiting"
        assert "1" in jobs[0]["reason"]
        detail = _json(*status, "default")
        assert [member["rank"] for member in detail["members"]] == [None]
        run.signal(signal.SIGINT)
        assert run.wait() == 130
        assert run.complaints == "paceline: stopping 1 worker\n"


def test_killing_the_launcher_ends_its_joined_workers(loop: str) -> None:
    with command("run", "-n", "3", loop) as run:
        run.wait_for("in the loop", 3)
        run.signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
        wait_until_gone(list(pids(run).values()))


def _json(*arguments: str) -> dict[str, list[dict[str, Any]]]:
    with command(*arguments) as run:
        assert run.wait() == 0, str(run)
    found: dict[str, list[dict[str, Any]]] = json.loads(run.stdout.splitlines()[-1])
    return found


LATE = """
import os, sys, time
import paceline

first = os.environ["PACELINE_LOCAL_RANK"] == "0"
if len(sys.argv) > 1 and not first:
    sys.exit("no such GPU")
time.sleep(1.0 if first == (len(sys.argv) > 1) else 0.0)  # as if one imported for longer
with paceline.join() as session:
    print("rank", session.rank, "of", session.size)
"""


def test_an_elastic_job_begins_with_all_workers_that_were_started(tmp_path: Path) -> None:
    """One joins a second later than the other, which is five times the settle time."""
    (tmp_path / "late.py").write_text(LATE)
    with command("run", "-n", "2", "--min", "1", "--max", "4", str(tmp_path / "late.py")) as run:
        assert run.wait() == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]


def test_an_elastic_job_begins_without_a_worker_that_ended_before_any_joined(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    began = time.monotonic()
    with command("run", "-n", "2", "--min", "1", str(tmp_path / "late.py"), "broken") as run:
        assert run.wait() == 0, run.stderr
    assert time.monotonic() - began < 30.0, "it waited for a worker that was known to be gone"
    assert sorted(run.stdout.splitlines()) == ["[0] rank 0 of 1"]


def test_an_elastic_job_begins_without_a_worker_that_does_not_join_in_time(tmp_path: Path) -> None:
    """The others have begun before their own time for joining is over."""
    code = """
import os, time
import paceline
if os.environ["PACELINE_LOCAL_RANK"] == "1":
    time.sleep(8.0)  # as if it hung in its imports; it goes before any other worker could be waited for again
    os._exit(0)
with paceline.join() as session:
    print("rank", session.rank, "of", session.size)
"""
    (tmp_path / "hangs.py").write_text(code)
    with command("run", "-n", "3", "--min", "2", str(tmp_path / "hangs.py"), PACELINE_JOIN_TIMEOUT="6") as run:
        assert run.wait() == 0, str(run)
    assert sorted(line.split("] ")[1] for line in run.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_workers_of_one_launcher_may_join_different_jobs(tmp_path: Path) -> None:
    code = """
import os, time
import paceline
began = time.monotonic()
with paceline.join(job="of " + os.environ["PACELINE_LOCAL_RANK"], min_workers=1, max_workers=2) as session:
    print(f"rank {session.rank} of {session.size}, at once: {time.monotonic() - began < 10.0}")
"""
    (tmp_path / "apart.py").write_text(code)
    with command("run", "-n", "2", "--min", "1", str(tmp_path / "apart.py")) as run:
        assert run.wait() == 0, str(run)
    assert run.stdout.count("rank 0 of 1, at once: True") == 2


def test_a_script_that_joins_finds_no_world_of_torch_beside_paceline(tmp_path: Path) -> None:
    """Otherwise a library would make one of it, with other ranks."""
    code = """
import os
import paceline
before = os.environ["WORLD_SIZE"]
with paceline.join():
    print(before, "RANK" in os.environ, "MASTER_ADDR" in os.environ)
"""
    (tmp_path / "joins.py").write_text(code)
    with command("run", "-n", "2", str(tmp_path / "joins.py")) as run:
        assert run.wait() == 0, str(run)
    assert [line.split("] ")[1] for line in run.stdout.splitlines()] == ["2 False False"] * 2


STAYS = """
import sys
import paceline
with paceline.join() as session:
    session.group.barrier()
    print("joined", flush=True)
    if sys.argv[1] == "hang":
        sys.stdin.close()
        __import__("time").sleep(100)
if sys.argv[1] == "fail":
    sys.exit(3)
"""


@pytest.mark.parametrize(("how", "key", "code"), [("end", "\n", 0), ("fail", "\x03", 3)])
def test_the_page_of_a_run_on_a_terminal_stays_until_a_key_is_pressed(
    how: str, key: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "stays.py").write_text(STAYS)
    with terminal("run", "-n", "2", "--http", str(tmp_path / "stays.py"), how) as shown:
        shown.wait_for("the page is served until you press Enter or Ctrl-C")
        found = re.search(r"the page is at (http://127\.0\.0\.1:\d+/)#token=(\w{64})\s", shown.text)
        assert found is not None, shown.text
        asked = urllib.request.Request(f"{found[1]}api/jobs/default", headers={"Authorization": f"Bearer {found[2]}"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert {each["output"] for each in json.load(answer)["gone"]} == {"joined"}
        shown.press(key)
        assert shown.wait() == code
        assert "Traceback" not in shown.text


@pytest.mark.parametrize(("how", "signum", "code"), [("end", signal.SIGTERM, 0), ("fail", signal.SIGHUP, 3)])
def test_a_signal_ends_the_page_of_a_run_with_the_code_of_its_job(
    how: str, signum: signal.Signals, code: int, tmp_path: Path
) -> None:
    (tmp_path / "stays.py").write_text(STAYS)
    (tmp_path / "tmp").mkdir()
    with terminal("run", "-n", "1", "--http", str(tmp_path / "stays.py"), how, TMPDIR=str(tmp_path / "tmp")) as shown:
        shown.wait_for("the page is served until you press Enter or Ctrl-C")
        shown.process.send_signal(signum)
        assert shown.wait() == code
        assert "Traceback" not in shown.text
    left = [path for path in (tmp_path / "tmp").rglob("*") if path.is_file() and path.parent.name != "stacks"]
    assert not left, "the coordinator's file has its token"


def test_a_run_in_the_background_of_a_shell_ends_with_its_job(tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text(STAYS)
    with terminal("run", "-n", "1", "--http", str(tmp_path / "stays.py"), "fail", background=True) as shown:
        assert shown.wait() == 3
        assert "joined" in shown.text
        assert "until you press" not in shown.text


def test_ctrl_c_in_a_run_ends_its_page_too(tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text(STAYS)
    with terminal("run", "-n", "1", "--http", str(tmp_path / "stays.py"), "hang") as shown:
        shown.wait_for("joined")
        shown.press("\x03")
        assert shown.wait() == 130
        assert "until you press" not in shown.text


def test_without_a_terminal_the_page_ends_with_its_run(tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text(STAYS)
    with command("run", "-n", "1", "--http", str(tmp_path / "stays.py"), "fail") as run:
        assert run.wait() == 3
        assert "until you press" not in run.stderr
