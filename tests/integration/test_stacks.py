"""`paceline debug stacks`: of workers that run, hold the GIL, are stopped, or have no folder for their file."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from paceline.testing import coordinator
from support.command import command
from support.processes import Worker, workers

JOB = """
import ctypes
session = paceline.join(min_workers=3, max_workers=3)
emit("joined", rank=session.rank)

def holds_the_gil():
    emit("there")
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # a system call that a signal does not end

def waits_for_a_word():
    emit("there")
    sys.stdin.readline()

holds_the_gil() if session.rank == int(os.environ.get("PACELINE_HOLDS", "-1")) else waits_for_a_word()
session.group.barrier()
session.leave()
"""


def stacks(address: str, **environment: str) -> dict[int, dict[str, Any]]:
    """What the command says, by rank."""
    with command("debug", "stacks", "digits", "--coordinator", address, "--json", **environment) as ended:
        assert ended.wait() == 0, str(ended)
        found = json.loads(ended.stdout.splitlines()[-1])["processes"]
        return {each["rank"]: each for each in found}


def place(process: dict[str, Any]) -> str:
    """In which of the functions above the main thread is."""
    (main,) = [each for each in process["threads"] if each["main"]]
    (found,) = [frame for frame in main["frames"] if frame.endswith((" in waits_for_a_word", " in holds_the_gil"))]
    return str(found).rpartition(" ")[2]


def by_rank(started: list[Worker]) -> dict[int, Worker]:
    found = {worker.expect("joined")["rank"]: worker for worker in started}
    for worker in started:
        worker.expect("there")
    return found


ENVIRONMENT = {"JOB": "digits", "FAILURE_TIMEOUT": "60"}


def test_equal_stacks_of_running_workers_are_shown_once() -> None:
    with coordinator() as address, workers(3, JOB, COORDINATOR=address, **ENVIRONMENT) as started:
        ranks = by_rank(started)
        for _ in range(2):
            found = stacks(address)
            assert all(place(found[rank]) == "waits_for_a_word" for rank in range(3))
        with command("debug", "stacks", "digits", "--coordinator", address) as ended:
            assert ended.wait() == 0, str(ended)
            assert ended.stdout.startswith("In each stack the newest call comes first.\nranks 0-2 (")
            assert ended.stdout.count("in waits_for_a_word") == 1
        assert [found[rank]["pid"] for rank in range(3)] == [ranks[rank].process.pid for rank in range(3)]
        for worker in started:
            worker.go()
        assert [worker.wait() for worker in started] == [0, 0, 0]


def test_stacks_show_a_gil_holder_and_report_a_stopped_worker() -> None:
    with coordinator() as address, workers(3, JOB, COORDINATOR=address, HOLDS="1", **ENVIRONMENT) as started:
        ranks = by_rank(started)
        ranks[2].signal(signal.SIGSTOP)
        found = stacks(address)
        assert place(found[0]) == "waits_for_a_word"
        assert place(found[1]) == "holds_the_gil"
        assert found[1]["trouble"] == ""
        assert found[2]["trouble"].startswith("has not answered within 1.0 s; the process is stopped (SIGSTOP")
        ranks[2].signal(signal.SIGCONT)
        for worker in started:
            worker.go()
        assert [worker.wait() for worker in started] == [0, 0, 0], "the signal has disturbed nobody"


def test_a_worker_on_the_same_host_signals_for_the_command(tmp_path: Path) -> None:
    """The command finds no files of workers, as on another host: it has another folder for temporary files."""
    with coordinator() as address, workers(3, JOB, COORDINATOR=address, HOLDS="1", **ENVIRONMENT) as started:
        by_rank(started)
        found = stacks(address, TMPDIR=str(tmp_path))
        assert [place(found[rank]) for rank in range(3)] == [
            "waits_for_a_word",
            "holds_the_gil",
            "waits_for_a_word",
        ]
        for worker in started:
            worker.go()
        assert [worker.wait() for worker in started] == [0, 0, 0]


def test_the_page_shows_the_stacks_of_a_gil_holder() -> None:
    """A member on its host signals it, whether all are asked or this one alone."""
    pages: list[str] = []
    with (
        coordinator(http="127.0.0.1:0", on_page=pages.append) as address,
        workers(3, JOB, COORDINATOR=address, HOLDS="1", **ENVIRONMENT) as started,
    ):
        ranks = by_rank(started)
        for path in ("stacks", "stacks?member=1"):
            asked = urllib.request.Request(f"{pages[0]}api/jobs/digits/{path}", headers={"X-Paceline": "page"})
            with urllib.request.urlopen(asked, timeout=20) as answer:
                found = {each["rank"]: each for each in json.load(answer)["processes"]}
            assert place(found[1]) == "holds_the_gil"
            assert (found[1]["pid"], found[1]["trouble"]) == (ranks[1].process.pid, "")
        for worker in started:
            worker.go()
        assert [worker.wait() for worker in started] == [0, 0, 0]


def test_stacks_of_a_gil_holder_need_a_folder_for_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"paceline-{os.geteuid()}").write_text("no folder can be made here")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with coordinator() as address, workers(3, JOB, COORDINATOR=address, HOLDS="1", **ENVIRONMENT) as started:
        by_rank(started)
        found = stacks(address)
        assert place(found[0]) == "waits_for_a_word"
        assert found[1]["threads"] == []
        assert "the process has no file for stacks: it could not make one when it joined" in found[1]["trouble"]
        for worker in started:
            worker.go()
        assert [worker.wait() for worker in started] == [0, 0, 0]
