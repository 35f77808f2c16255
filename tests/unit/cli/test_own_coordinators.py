"""Where a user's commands keep the tokens of their coordinators: what is found, and what is not believed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from paceline._base.proofs import TokenSource
from paceline._base.terminal import UsageError
from paceline._session.flight import flight_directory
from paceline.cli import admin, status
from paceline.cli.access import coordinator_address
from paceline.errors import CoordinatorUnreachable
from paceline.launch import _own_coordinator
from paceline.launch._own_coordinator import own_addresses, own_credentials, own_token, published
from pacelinepb.v1.admin_pb2 import JobSummary, ListJobsResponse

ADDRESS, OTHER = "127.0.0.1:40001", "127.0.0.1:40002"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("PACELINE_TOKEN", "PACELINE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    _own_coordinator._say_once.cache_clear()
    return tmp_path / f"paceline-{os.geteuid()}" / "coordinators"


def test_a_token_is_found_only_while_its_coordinator_is_published(folder: Path) -> None:
    assert (own_token(ADDRESS), own_addresses()) == (None, [])
    with published(ADDRESS, "first"):
        assert (own_token(ADDRESS), own_token(OTHER), own_addresses()) == ("first", None, [ADDRESS])
        assert own_token("localhost:40001") is None  # it may be ::1, where somebody else may listen
        assert own_credentials(ADDRESS).token is not None
        assert own_credentials(OTHER).token is None
    assert list(folder.iterdir()) == []


def test_a_stale_token_of_a_killed_command_is_not_used(folder: Path) -> None:
    """Whoever has the port now would learn it."""
    folder.mkdir(parents=True, mode=0o700)
    left = folder / ADDRESS
    left.touch(mode=0o600)
    left.write_text("old")
    assert (own_token(ADDRESS), own_addresses()) == (None, [])
    with published(ADDRESS, "new"):
        assert own_token(ADDRESS) == "new"


def test_published_token_precedes_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the shell has for a cluster would be refused there."""
    monkeypatch.setenv("PACELINE_TOKEN", "a-token-for-a-cluster")
    with published(ADDRESS, "made"):
        assert shown(ADDRESS) == "made"
        assert shown(OTHER) == "a-token-for-a-cluster"


def test_a_coordinator_with_the_token_of_the_environment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "a-token-for-a-cluster")
    with published(ADDRESS, ""):
        assert (own_addresses(), own_token(ADDRESS)) == ([ADDRESS], None)
        assert shown(coordinator_address(None)) == "a-token-for-a-cluster"


def shown(address: str) -> str:
    """What a command shows to that coordinator."""
    token = own_credentials(address).token
    assert isinstance(token, TokenSource)
    return asyncio.run(token.current())


def test_the_only_running_coordinator_is_the_default_address() -> None:
    with pytest.raises(UsageError, match=r"name the coordinator \(--coordinator\): no paceline run of yours"):
        coordinator_address(None)
    with published(OTHER, "two"):
        assert coordinator_address(None) == OTHER
        with published(ADDRESS, "one"), pytest.raises(UsageError, match=f"commands serve {ADDRESS}, {OTHER}$"):
            coordinator_address(None)
    assert coordinator_address("host") == "host:7400"


def test_coordinator_of_picks_the_coordinator_that_has_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {ADDRESS: ["a", "both"], OTHER: ["b", "both"]}
    monkeypatch.setattr(admin, "list_jobs", lambda address, _: [JobSummary(name=name) for name in jobs[address]])
    with published(ADDRESS, "one"), published(OTHER, "two"):
        assert admin.coordinator_of("b", None, 1.0) == OTHER
        assert admin.coordinator_of("b", "host", 1.0) == "host:7400"
        for job in ("both", "neither"):
            with pytest.raises(UsageError) as caught:
                admin.coordinator_of(job, None, 1.0)
            assert str(caught.value).endswith(f"serve {ADDRESS} (jobs: a, both), {OTHER} (jobs: b, both)")


def test_status_without_a_coordinator_shows_the_jobs_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed(address: str, timeout: float) -> ListJobsResponse:
        if address == OTHER:
            raise CoordinatorUnreachable("it has just ended")
        return ListJobsResponse(jobs=[JobSummary(name="digits")])

    monkeypatch.setattr(status, "list_all", listed)
    with published(ADDRESS, "one"), published(OTHER, "two"):
        status.show_status(None, None, 1.0, as_json=False)
    first, second = capsys.readouterr().out.split(f"coordinator {OTHER}:\n")
    assert first.startswith(f"coordinator {ADDRESS}:\n")
    assert "digits" in first
    assert second == "it has just ended\n"


def test_localhost_resolves_to_the_published_loopback_address() -> None:
    name = f"localhost:{ADDRESS.rpartition(':')[2]}"
    assert coordinator_address(name) == name
    with published(ADDRESS, "token"):
        assert coordinator_address(name) == ADDRESS


@pytest.mark.parametrize("planted", ["open", "link", "fifo", "another's"])
def test_a_token_file_that_another_user_may_have_made_is_not_used(
    folder: Path, planted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir(parents=True, mode=0o700)
    path = folder / ADDRESS
    if planted == "link":
        (folder.parent / "else").write_text("planted")
        path.symlink_to(folder.parent / "else")
    elif planted == "fifo":
        os.mkfifo(path, 0o600)
    else:
        path.write_text("planted")
        path.chmod(0o604 if planted == "open" else 0o600)
    if planted == "another's":
        monkeypatch.setattr("pacelinepb.private_files.os.geteuid", lambda: 12345)
        monkeypatch.setattr(_own_coordinator, "check_own", lambda *_: None)
        monkeypatch.setattr(_own_coordinator, "_folder", lambda: folder)
    held = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert own_token(ADDRESS) is None
    finally:
        os.close(held)
    said = capsys.readouterr().err
    assert ("cannot look for" if planted == "link" else "cannot use") in said


def test_an_unusable_folder_only_prints_a_warning(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.parent.symlink_to(tmp_path)
    (tmp_path / "coordinators").write_text("a file")
    with published(ADDRESS, "token"):
        assert own_token(ADDRESS) is None
    assert "paceline status, drain and other launchers cannot reach this run" in capsys.readouterr().err


def test_without_a_temporary_directory_no_token_is_stored_or_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container that is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/1/nowhere"])
    with published(ADDRESS, "token"):
        assert (own_token(ADDRESS), own_addresses()) == (None, [])
        assert own_credentials(ADDRESS).token is None
    assert "paceline status, drain and other launchers cannot reach this run" in capsys.readouterr().err
    assert flight_directory({}) is None
