"""Coordinators inside this user's commands, and the tokens that those made for them: how `paceline status` gets in.

Each has a file, ADDRESS, with its token, in a folder of the user's own. The command that serves holds a lock on it as
long as it lives: what a killed one left behind is known by that, and its token is shown to nobody who took the port.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from paceline.cli.output import say
from paceline.user_folder import check_own, make_private, user_folder
from pacelinepb.private_files import FileTooOpen, read_own

__all__ = ["own_addresses", "own_token", "published"]

_MAX_BYTES = 1024


@contextmanager
def published(address: str, token: str) -> Iterator[None]:
    """Keeps the token where this user's other commands find it, for as long as the block lasts.

    Without such a place training goes on all the same: a line on stderr says what will not work.

    Args:
        address: "IP:port" of loopback. A name could mean another address to whoever looks it up.
        token: what was made for its callers to show; empty if they are to have that of their environment.
    """
    try:
        path = _folder() / address
        lock = _publish(path, token)
    except OSError as error:
        if token:
            say(f"paceline status, drain and other launchers cannot ask this run: its token cannot be kept: {error}")
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(lock)


def own_token(address: str) -> str | None:
    """The token that was made for a coordinator of this user's commands; None if none of them serves there with one."""
    return _read(address) or None


def own_addresses() -> list[str]:
    """Where this user's commands serve coordinators now, in order."""
    try:
        names = sorted(path.name for path in _folder().iterdir() if not path.name.startswith("."))
    except OSError:
        return []
    return [name for name in names if _read(name) is not None]


def _folder() -> Path:
    return user_folder("coordinators")


def _publish(path: Path, token: str) -> int:
    """Writes the file, locked before it has its name; returns the descriptor that holds the lock.

    Raises:
        OSError: it cannot be written, or the folder is not this user's alone.
    """
    make_private(path.parent, "set TMPDIR to another directory")
    lock, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)  # 0600
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, token.encode())
        os.replace(temporary, path)
    except BaseException:
        os.close(lock)
        os.unlink(temporary)
        raise
    return lock


def _read(address: str) -> str | None:
    """What a file holds whose command lives; None if there is none. A file that should not be used is told of."""
    try:
        path = _folder() / address
        check_own(path.parent, "it is not used")
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        _say_once(f"no token of paceline run is looked for: {error}")
        return None
    try:
        return read_own(file, path, _MAX_BYTES).decode() if _is_locked(file) else None
    except (FileTooOpen, OSError, ValueError) as error:
        _say_once(f"the token of a paceline run is not used: {error}")
        return None
    finally:
        os.close(file)


@cache
def _say_once(text: str) -> None:
    say(text)


def _is_locked(file: int) -> bool:
    """True while the command that made the file lives; the system takes its lock away, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
