"""What holds secrets is for one user: made so from the first instant, and refused where others may read it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline._base.terminal import UsageError
from paceline.cli.certs import make_certificates
from paceline.credentials import Credentials
from paceline_server.security.tls import TlsPaths, TlsUnusable
from paceline_server.security.token_file import read_tokens
from paceline_server.security.tokens import TokensUnusable
from paceline_server.storage.base import KeySet, StateUnusable
from paceline_server.storage.sqlite import SqliteStorage
from pacelinepb.private_files import FileTooOpen, check_private
from support.certificates import make_folder

TOKEN = "a-token-of-this-test-alone"
ME, ANOTHER, ROOT = 1000, 1001, 0


def status(mode: int, owner: int, kind: int = stat.S_IFREG, links: int = 1) -> os.stat_result:
    return os.stat_result((kind | mode, 1, 1, links, owner, 1, 1, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "owner", "user", "mend"),
    [
        (0o600, ME, ME, None),
        (0o400, ME, ME, None),
        (0o640, ME, ME, "chmod 600 "),
        (0o620, ME, ME, "chmod 600 "),
        (0o604, ME, ME, "chmod 600 "),
        (0o440, ROOT, ME, None),  # a secret that Kubernetes mounts for the fsGroup
        (0o640, ROOT, ROOT, None),
        (0o644, ROOT, ROOT, "chmod 600 "),
        (0o444, ROOT, ME, "chmod o-rwx "),
        (0o640, ANOTHER, ME, None),
        (0o642, ANOTHER, ME, "chmod o-rwx "),
    ],
)
def test_the_allowed_modes_of_a_secret_file_depend_on_its_owner(
    mode: int, owner: int, user: int, mend: str | None
) -> None:
    if mend is None:
        check_private(Path("/run/the key"), status(mode, owner), user)
        return
    with pytest.raises(FileTooOpen, match=f"^/run/the key holds .* mode {mode:04o} .*: run {mend}'/run/the key'"):
        check_private(Path("/run/the key"), status(mode, owner), user)


def test_the_mode_of_devices_and_unlinked_files_is_not_checked() -> None:
    check_private(Path("/dev/stdin"), status(0o666, ME, stat.S_IFCHR), ME)
    check_private(Path("/dev/fd/3"), status(0o777, ME, links=0), ME)


def test_world_readable_token_files_are_refused(tmp_path: Path) -> None:
    path, link = tmp_path / "token", tmp_path / "link"
    path.write_text(TOKEN)
    link.symlink_to(path)
    path.chmod(0o644)
    for named in (path, link):
        words = f"the token file {named} holds a secret, and its mode 0644 .*: run chmod 600 {named}"
        with pytest.raises(TokensUnusable, match=words):
            read_tokens(named)
        with pytest.raises(FileTooOpen, match=words):
            Credentials(token=named)
    path.chmod(0o600)
    read_tokens(link)
    Credentials(token=link)


def test_world_readable_keys_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tls")
    ours, theirs = folder.path / "coordinator.key", folder.path / "member.key"
    server = TlsPaths(folder.path / "coordinator.pem", ours)
    server.read()
    Credentials.from_environment(folder.environment)
    for path in (ours, theirs):
        path.chmod(0o604)
    with pytest.raises(TlsUnusable, match=f"the key {ours} holds a secret, and its mode 0604"):
        server.read()
    with pytest.raises(FileTooOpen, match=f"PACELINE_TLS_KEY: {theirs} holds a secret, and its mode 0604"):
        Credentials.from_environment(folder.environment)


def test_documented_commands_create_private_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`paceline certs`, and a token made under `umask 077`, whatever the umask around them is."""
    folder, token = tmp_path / "tls", tmp_path / "token"
    before = os.umask(0)
    try:
        make_certificates(folder, [], 1)
        subprocess.run(["sh", "-c", f"(umask 077; echo {TOKEN} > {token})"], check=True)
    finally:
        os.umask(before)
    TlsPaths(folder / "coordinator.pem", folder / "coordinator.key", folder / "ca.pem").read()
    read_tokens(token)
    (folder / "ca.key").chmod(0o644)
    with pytest.raises(UsageError, match=r"ca\.key holds a secret, and its mode 0644"):
        make_certificates(folder, [], 1)


def opened(path: Path, look: Callable[[], Any] = lambda: None) -> Any:
    """Stores something in a state file; returns what was seen while it was open."""

    async def main() -> Any:
        storage = SqliteStorage(path)
        try:
            await storage.load()
            await storage.write([KeySet("job", "key", b"secret")])
            return look()
        finally:
            await storage.close()

    return asyncio.run(main())


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("link", [False, True])
def test_a_state_file_is_private_when_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool) -> None:
    """Nobody who opens it when it has just been made can read on later."""
    path = tmp_path / "state.db"
    if link:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    seen: dict[str, int] = {}
    connect = sqlite3.connect

    def looking(*arguments: Any, **options: Any) -> Any:
        seen.update(modes(tmp_path))
        return connect(*arguments, **options)

    monkeypatch.setattr(sqlite3, "connect", looking)
    before = os.umask(0)
    try:
        found = opened(path, lambda: modes(tmp_path))
    finally:
        os.umask(before)
    assert seen["state.db"] == 0o600
    assert {"state.db", "state.db-wal"} <= set(found)
    assert {name: mode for name, mode in found.items() if mode != 0o600} == {}


def test_a_world_readable_state_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    opened(path)
    for name in ("state.db", "state.db-wal"):
        file = tmp_path / name
        file.touch()
        file.chmod(0o644)
        words = f"cannot use the state file .*: {file} holds a secret, and its mode 0644 .*: run chmod 600 {file}"
        with pytest.raises(StateUnusable, match=words):
            opened(path)
        file.chmod(0o600)
    opened(path)


def test_a_group_accessible_state_file_is_made_private_again(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    opened(path)
    (tmp_path / "state.db-wal").touch()
    for name in ("state.db", "state.db-wal"):
        (tmp_path / name).chmod(0o660)
    assert set(opened(path, lambda: modes(tmp_path)).values()) == {0o600}


def test_a_second_coordinator_does_not_release_the_lock_of_the_first(tmp_path: Path) -> None:
    """In one process, where to close a file takes off all locks on it."""
    path = tmp_path / "state.db"
    other = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"

    async def main() -> None:
        first, second = SqliteStorage(path), SqliteStorage(path)
        await first.load()
        with pytest.raises(StateUnusable, match="another coordinator is using it"):
            await second.load()
        await second.close()
        words = [sys.executable, "-c", other, str(path)]
        ended = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=20)
        await first.close()
        assert "database is locked" in ended.stderr

    asyncio.run(main())


@pytest.mark.needs(what="root")
def test_another_user_cannot_read_the_state(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("another user takes root")
    folder = Path("/tmp") / f"paceline-{os.getpid()}"  # `tmp_path` lets nobody else in
    folder.mkdir(mode=0o755)

    def read(path: Path) -> str:
        return subprocess.run(
            ["cat", str(path)], user=65534, group=65534, extra_groups=[], stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        ).stderr  # fmt: skip

    try:
        (folder / "open").touch()
        assert read(folder / "open") == ""  # it can get there
        for name, said in opened(
            folder / "state.db", lambda: {path.name: read(path) for path in folder.glob("state.db*")}
        ).items():
            assert "Permission denied" in said, name
        with closing(sqlite3.connect(folder / "state.db")) as connection:
            assert connection.execute("SELECT value FROM key").fetchall() == [(b"secret",)]
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
