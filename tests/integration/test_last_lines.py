"""The last lines of workers: of live ones, which answer an operator, and of those that have ended."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from paceline.testing import coordinator
from support.command import Command, command
from support.processes import workers

JOIN = """
import os, signal, sys, time
import paceline

def until(path):
    while not os.path.exists(path):
        time.sleep(0.01)

"""

SPEAKS = """
print("in C too", flush=True)
os.write(1, b"from C \\x1b[31mred\\x1b[m\\n")
os.write(2, b"caf\\xc3\\xa9 \\xff\\x00\\n")
print("imported")
with paceline.join() as session:
    print("joined", flush=True)
    os.write(1, b"10%\\r20%\\r30%")
    until(sys.argv[1])
"""


def write(folder: Path, code: str) -> str:
    path = folder / "script.py"
    path.write_text(JOIN + textwrap.dedent(code))
    return str(path)


@pytest.fixture
def address() -> Iterator[str]:
    with coordinator() as address:
        yield address


def ask(address: str, job: str = "digits") -> dict[str, Any]:
    """The answer of `paceline debug output` about a job."""
    with command("debug", "output", "--json", "--coordinator", address, job) as ended:
        assert ended.wait() == 0, str(ended)
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return found


def launch(address: str, *arguments: str) -> AbstractContextManager[Command]:
    return command("run", "--coordinator", address, "--job", "digits", *arguments)


def lines_of(run: Command, address: str, rank: int, last: str) -> list[str]:
    """The lines of a live worker, once this is the last one."""
    lines: list[str] = []
    while lines[-1:] != [last]:
        assert run.process.poll() is None, str(run)
        lines = next((each["lines"] for each in ask(address)["members"] if each["rank"] == rank), [])
    return lines


@pytest.mark.parametrize("program", ["script", "-- PROGRAM"])
def test_a_live_worker_answers_with_its_last_lines(program: str, tmp_path: Path, address: str) -> None:
    go, script = tmp_path / "go", write(tmp_path, SPEAKS)
    whole = [script] if program == "script" else ["--no-python", "sh", "-c", f'{sys.executable} {script} "$0"; exit $?']
    with launch(address, "-n", "2", *whole, str(go)) as run:
        run.wait_for("joined", 2)
        for rank in (0, 1):
            lines = lines_of(run, address, rank, "30%")
            lines.remove("café \N{REPLACEMENT CHARACTER}")  # of the other stream, so its place is not known
            assert lines == ["in C too", "from C red", "imported", "joined", "30%"]
        with command("debug", "output", "--coordinator", address, "digits", "1") as shown:
            assert shown.wait() == 0
            head, *lines = shown.stdout.splitlines()
            assert head.startswith("rank 1 (")
            assert lines[-2:] == ["  joined", "  30%"]
        go.touch()
        assert run.wait() == 0, str(run)


def test_a_spare_that_becomes_a_worker_answers_too(tmp_path: Path, address: str) -> None:
    go = tmp_path / "go"
    script = write(
        tmp_path,
        """
        print("hello", os.environ["PACELINE_LOCAL_RANK"], flush=True)
        with paceline.join(min_workers=1, max_workers=1):
            if not os.path.exists(sys.argv[1]):
                open(sys.argv[1], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            print("again", flush=True)
            until(sys.argv[2])
        """,
    )
    with launch(address, "-n", "1", "--restarts", "1", script, str(tmp_path / "died"), str(go)) as run:
        run.wait_for("again")
        assert lines_of(run, address, 0, "again") == ["hello 0", "again"]
        go.touch()
        assert run.wait() == 0, str(run)


def test_a_chatty_worker_answers_with_what_it_has_just_printed(tmp_path: Path, address: str) -> None:
    """1,000 lines a second, a line of 10 MB, and bytes that are no text."""
    go, script = (
        tmp_path / "go",
        write(
            tmp_path,
            """
            with paceline.join() as session:
                for number in range(1_000):
                    os.write(1, b"line %d\\n" % number)
                    time.sleep(0.0005)
                print("counted", flush=True)
                until(sys.argv[1] + "1")
                for _ in range(160):
                    os.write(1, b"x" * (64 << 10))
                os.write(1, b"\\nlong line ended\\n")
                until(sys.argv[1] + "2")
                os.write(1, bytes(range(256)) * 100 + b"\\ngarbage ended\\n")
                until(sys.argv[1] + "3")
            """,
        ),
    )
    with launch(address, "-n", "1", script, str(go)) as run:
        run.wait_for("counted")
        assert lines_of(run, address, 0, "counted") == [*(f"line {number}" for number in range(951, 1_000)), "counted"]
        (tmp_path / "go1").touch()
        long = lines_of(run, address, 0, "long line ended")
        assert set("".join(long[:-1])) == {"x"}
        assert 8_000 < len("\n".join(long)) <= 8 << 10
        (tmp_path / "go2").touch()
        garbage = lines_of(run, address, 0, "garbage ended")
        assert all(each.isprintable() or each == "\t" for line in garbage for each in line)
        (tmp_path / "go3").touch()
        assert run.wait() == 0


def test_the_last_lines_of_a_killed_worker_are_shown(tmp_path: Path, address: str) -> None:
    go = tmp_path / "go"
    script = write(
        tmp_path,
        """
        with paceline.join() as session:
            print("rank", session.rank, flush=True)
            if session.rank == 1:
                print("x" * 3_000, flush=True)
                os.write(2, b"about to die\\n\\x1b[1mSegmenta")
                os.kill(os.getpid(), signal.SIGKILL)
            until(sys.argv[1])
        """,
    )
    with launch(address, "-n", "2", "--min", "1", script, str(go)) as run:
        run.wait_for("about to die")
        gone: list[Any] = []
        while not gone:
            assert run.process.poll() is None, str(run)
            gone = ask(address)["gone"]
        (last,) = gone
        assert (last["rank"], last["how"]) == (1, "was killed by SIGKILL")
        assert last["lines"] == ["about to die", "Segmenta"], "whole lines that fit into 2,000 bytes"
        with command("debug", "output", "--coordinator", address, "digits") as shown:
            assert shown.wait() == 0
            assert "was killed by SIGKILL" in shown.stdout
            assert shown.stdout.endswith(" s ago:\n  about to die\n  Segmenta\n")
        with command("status", "--coordinator", address, "digits", "--json") as status:
            assert status.wait() == 0
            assert json.loads(status.stdout)["gone"][0]["output"] == "about to die\nSegmenta"
        go.touch()
        run.wait()


def test_a_worker_without_a_launcher_says_so(address: str) -> None:
    code = """
    session = paceline.join(min_workers=1, max_workers=1)
    emit("joined")
    wait_for_go()
    session.leave()
    """
    with workers(1, code, COORDINATOR=address, JOB="alone") as (worker,):
        worker.expect("joined")
        (member,) = ask(address, "alone")["members"]
        assert (member["lines"], member["trouble"]) == (
            [],
            "its output is not kept: it was not started by paceline run",
        )
        worker.go()
        assert worker.wait() == 0
        with command("debug", "output", "alone", "--coordinator", address) as ended:
            assert ended.wait() == 1
            assert "has no members" in ended.stderr
