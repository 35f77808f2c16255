"""Stacks by a signal: a member signals members of its own job, and no other process, whoever asks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline._session import stack_file
from paceline.cli.admin import ask_members
from paceline.testing import coordinator
from pacelinepb.v1.session_pb2 import QUESTION_STACKS
from support.processes import Worker, workers

JOB = """
def in_its_loop():
    emit("joined", pid=os.getpid())
    wait_for_go()

session = paceline.join(min_workers=int(os.environ["PACELINE_WORLD"]), max_workers=int(os.environ["PACELINE_WORLD"]))
in_its_loop()
session.leave()
"""

MOVES = """
for job in ("a", "b"):
    session = paceline.join(job=job, min_workers=1, max_workers=1)
    emit("joined", pid=os.getpid())
    wait_for_go()
    session.leave()
emit("left")
wait_for_go()
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of this test's stack files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(stack_file.tempfile, "tempdir", None)
    return tmp_path / f"paceline-{os.geteuid()}" / "stacks"


def pids_of(started: Sequence[Worker]) -> list[int]:
    return [worker.expect("joined")["pid"] for worker in started]


def ask(address: str, job: str, *pids: int) -> list[tuple[int, bool, str]]:
    """Asks the first member of a job for the stacks of processes; each pid, if there are stacks, and the trouble."""
    (answer,) = ask_members(address, job, QUESTION_STACKS, 10.0, members=["0"], pids=pids, patience=10.0)
    return [(each["pid"], bool(each["text"]), each["trouble"]) for each in json.loads(answer.data)["stacks"]]


def refusal(pid: int) -> tuple[int, bool, str]:
    text = f"pid {pid} is no member of this job, and a member answers only for members of its own job"
    return pid, False, text


def test_an_operator_of_one_job_cannot_read_stacks_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {name: name.ljust(32, "x") for name in ("operator-a", "worker-a", "worker-b")}
    file = tmp_path / "tokens"
    file.write_text("".join(f"{token} role={name[:-2]} {name[-1]}\n" for name, token in tokens.items()))
    file.chmod(0o600)
    monkeypatch.setenv("PACELINE_TOKEN", tokens["operator-a"])
    with (
        coordinator(token_file=file) as address,
        workers(2, JOB, COORDINATOR=address, JOB="a", WORLD="2", TOKEN=tokens["worker-a"]) as a,
        workers(1, JOB, COORDINATOR=address, JOB="b", WORLD="1", TOKEN=tokens["worker-b"]) as b,
    ):
        own, (other,) = pids_of(a), pids_of(b)
        assert ask(address, "a", *own, other) == [(own[0], True, ""), (own[1], True, ""), refusal(other)]
        for worker in a + b:
            worker.go()
        assert [worker.wait() for worker in a + b] == [0, 0, 0]


def test_stacks_of_a_same_named_job_elsewhere_are_refused() -> None:
    with (
        coordinator() as here,
        coordinator() as there,
        workers(1, JOB, COORDINATOR=here, JOB="a", WORLD="1") as a,
        workers(1, JOB, COORDINATOR=there, JOB="a", WORLD="1") as b,
    ):
        pids_of(a)
        (other,) = pids_of(b)
        assert ask(here, "a", other) == [refusal(other)]
        for worker in a + b:
            worker.go()


def test_a_process_carries_only_the_mark_of_its_current_job(own_folder: Path) -> None:
    with (
        coordinator() as address,
        workers(1, MOVES, COORDINATOR=address) as moves,
        workers(1, JOB, COORDINATOR=address, JOB="b", WORLD="1") as b,
    ):
        # Whoever comes first has the only place of "b", so the one that moves waits for it.
        pids_of(b)
        (pid,) = pids_of(moves)
        assert ask(address, "b", pid) == [refusal(pid)]
        assert len(marks(own_folder, pid)) == 1
        moves[0].go()
        b[0].go()
        assert b[0].wait() == 0
        pids_of(moves)
        assert len(marks(own_folder, pid)) == 1, "that of the job before is gone"
        moves[0].go()
        moves[0].expect("left")
        assert marks(own_folder, pid) == []
        moves[0].go()


def marks(folder: Path, pid: int) -> list[Path]:
    return [path for path in folder.glob(f"*.{pid}.*.*") if len(path.suffix) == 65]


def test_a_mark_is_valid_for_one_process_only(own_folder: Path) -> None:
    """Neither a process that copies it for its own pid gets anything from it, nor one that gets a pid again."""
    with (
        coordinator() as address,
        workers(2, JOB, COORDINATOR=address, JOB="a", WORLD="2", FAILURE_TIMEOUT="60") as a,
        workers(1, JOB, COORDINATOR=address, JOB="b", WORLD="1") as b,
    ):
        own, (other,) = pids_of(a), pids_of(b)
        (mark,) = marks(own_folder, own[1])
        (theirs,) = marks(own_folder, other)
        theirs.with_suffix(mark.suffix).touch()
        assert ask(address, "a", other) == [refusal(other)]
        theirs.rename(mark.with_name(mark.stem + theirs.suffix))
        assert ask(address, "a", own[1]) == [(own[1], True, "")]
        a[1].process.kill()
        a[1].wait()
        with workers(1, JOB, COORDINATOR=address, JOB="c", WORLD="1") as c:
            pids_of(c)
            assert marks(own_folder, own[1]) == [], "whoever comes next removes the marks of those that have ended"
            c[0].go()
        for worker in (a[0], b[0]):
            worker.go()


def test_a_process_without_a_mark_is_not_signaled() -> None:
    """Children that a member has forked, and processes that have nothing to do with Paceline."""
    with coordinator() as address, workers(1, JOB, COORDINATOR=address, JOB="a", WORLD="1") as a:
        pids_of(a)
        ((pid, has_stacks, trouble),) = ask(address, "a", os.getpid())
        assert (pid, has_stacks) == (os.getpid(), False)
        assert trouble.startswith("the process has no file for stacks")
        a[0].go()
