"""Calls of a scheduler to its coordinator: for a token, the members of a job, and a drain (`paceline.launch`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.config import Config
from paceline.errors import CoordinatorUnreachable, NotAuthenticated, PacelineError
from paceline.launch import RunningJob, own_coordinator, token_for
from paceline.launch._own_coordinator import own_addresses
from support.blocks import ROOT, blocks
from support.ports import free_port

QUICK = Config(failure_timeout=1.0, join_timeout=10.0)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of this test's coordinators are found by this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("PACELINE_TOKEN", "PACELINE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def joined(address: str, token: str | None) -> list[paceline.Session]:
    def join(_: int) -> paceline.Session:
        credentials = paceline.Credentials(token=token)
        return paceline.join(address, job="digits", min_workers=2, config=QUICK, credentials=credentials)

    with ThreadPoolExecutor(2) as pool:
        return sorted(pool.map(join, range(2)), key=lambda session: session.rank)


def test_status_lists_the_members_and_drain_selects_them() -> None:
    with own_coordinator() as served, RunningJob(served.address, "digits", timeout=5.0) as job:
        with pytest.raises(PacelineError, match="there is no job 'digits'"):
            job.status()
        sessions = joined(served.address, served.token)
        status = job.status()
        assert [member.rank for member in status.members] == [0, 1]
        assert {(member.host, member.pid) for member in status.members} == {(socket.gethostname(), os.getpid())}
        assert status.reason
        ids = [member.member_id for member in status.members]
        assert job.drain("1") == job.drain(1) == ids[1:]
        assert job.drain(ids[0]) == ids[:1]
        assert sorted(job.drain_all()) == sorted(ids)
        with pytest.raises(PacelineError, match="has no member 7"):
            job.drain("7")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda session: session.leave(), sessions))


def test_drain_without_members_raises_value_error() -> None:
    with RunningJob(f"127.0.0.1:{free_port()}", "digits") as job, pytest.raises(ValueError, match=r"drain_all\(\)"):
        job.drain(*[])


def test_the_documented_drain_machine_drains_members_of_one_host() -> None:
    page = {block.title: block.code for block in blocks(ROOT / "docs/how-to/own-scheduler.md")}
    names: dict[str, Any] = {}
    exec(compile(page["drain_machine.py"], "drain_machine.py", "exec"), names)
    with own_coordinator() as served, RunningJob(served.address, "digits", timeout=5.0) as job:
        sessions = joined(served.address, served.token)
        assert names["drain_machine"](job, "elsewhere") == []
        ids = [member.member_id for member in job.status().members]
        assert sorted(names["drain_machine"](job, socket.gethostname())) == sorted(ids)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda session: session.leave(), sessions))


def test_members_of_a_void_view_are_listed_until_they_leave() -> None:
    with own_coordinator() as served, RunningJob(served.address, "digits", timeout=5.0) as job:
        first, second = joined(served.address, served.token)
        first.leave(RuntimeError("it has failed"))
        assert [member.rank for member in job.status().members] == [1]
        assert "is void" in job.status().reason
        second.leave()
        assert job.status().members == ()


def test_a_waiting_worker_has_no_rank() -> None:
    with own_coordinator() as served, RunningJob(served.address, "digits", timeout=5.0) as job:
        credentials = paceline.Credentials(token=served.token)
        with ThreadPoolExecutor(1) as pool:
            alone = pool.submit(
                paceline.join,
                served.address,
                job="digits",
                min_workers=2,
                config=Config(join_timeout=2.0),
                credentials=credentials,
            )
            ranks: list[int | None] = []
            while not ranks:
                try:
                    ranks = [member.rank for member in job.status().members]
                except PacelineError:  # it has not come yet
                    assert not alone.done()
            assert ranks == [None]
            assert isinstance(alone.exception(), PacelineError)


def test_unreachable_coordinator_raises_coordinator_unreachable() -> None:
    with (
        RunningJob(f"127.0.0.1:{free_port()}", "digits", timeout=0.2) as job,
        pytest.raises(CoordinatorUnreachable),
    ):
        job.status()


def test_own_coordinator_makes_a_token_that_callers_need() -> None:
    with own_coordinator() as served:
        assert served.token is not None
        assert served.token not in repr(served)
        assert token_for(served.address) == served.token
        assert own_addresses() == [served.address]
        with pytest.raises(NotAuthenticated):
            paceline.join(served.address, job="digits", min_workers=1, config=QUICK)
    assert own_addresses() == []
    assert token_for(served.address) is None


def test_a_token_from_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "a-token-of-this-test")
    with own_coordinator() as served:
        assert served.token is None, "workers inherit it"
        assert token_for(served.address) == "a-token-of-this-test"
    monkeypatch.delenv("PACELINE_TOKEN")
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("a-token-in-a-file\n")
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(file))
    assert token_for("elsewhere:7400") == "a-token-in-a-file"


def test_a_coordinator_on_all_interfaces_has_no_own_address() -> None:
    with own_coordinator(listen="0.0.0.0:0"):
        assert own_addresses() == []


def test_own_coordinator_without_make_token_needs_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="callers need a token or certificates"), own_coordinator(make_token=False):
        pass
    monkeypatch.setenv("PACELINE_TOKEN", "a-token-of-this-test")
    with own_coordinator(make_token=False) as served:
        monkeypatch.delenv("PACELINE_TOKEN")
        with pytest.raises(NotAuthenticated):
            paceline.join(served.address, job="digits", min_workers=1, config=QUICK)


def test_an_empty_token_variable_raises_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "")
    with pytest.raises(ValueError, match="PACELINE_TOKEN is set, but empty"), own_coordinator():
        pass
    with pytest.raises(ValueError, match="PACELINE_TOKEN is set, but empty"):
        token_for("elsewhere:7400")


def test_sigterm_to_the_documented_scheduler_lets_workers_leave(tmp_path: Path) -> None:
    page = {block.title: block.code for block in blocks(ROOT / "docs/how-to/own-scheduler.md")}
    (tmp_path / "scheduler.py").write_text(page["scheduler.py"])
    endless = page["train.py"].replace("total=20", "total=100_000")
    # Each line at once: those of two workers must not come as one.
    says = "        with step:\n            os.write(1, b'%d\\n' % os.getpid())\n"
    (tmp_path / "train.py").write_text(endless.replace("        with step:\n", says))
    (tmp_path / "killed").touch()  # so that no rank kills itself
    scheduler = subprocess.Popen(
        [sys.executable, "scheduler.py", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert scheduler.stdout is not None
        trained: set[str] = set()
        while len(trained) < 3:
            trained.add(scheduler.stdout.readline())
        scheduler.terminate()
        assert scheduler.wait(30.0) == 0, "each has left with 0"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(scheduler.pid, signal.SIGKILL)
        scheduler.stdout.close()
