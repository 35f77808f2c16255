"""Folders of this user's own among the temporary files, where anybody may have been first: they are checked."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

__all__ = ["check_own", "make_private", "user_folder"]


def user_folder(name: str) -> Path:
    """`paceline-UID/NAME` among the temporary files; nothing is made.

    Raises:
        FileNotFoundError: there is no directory for temporary files that can be written to.
    """
    return Path(tempfile.gettempdir(), f"paceline-{_user()}", name).absolute()


def make_private(directory: Path, remedy: str) -> None:
    """Makes the directory, 0700, with what lacks above it; refuses one that somebody else could have put there.

    Args:
        directory: its absolute path.
        remedy: ends an error's text: what to do.

    Raises:
        OSError: it cannot be made, or `check_own` refuses it.
    """
    missing = [path for path in (directory, *directory.parents) if not os.path.lexists(path)]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)  # exist_ok: another process may be doing the same
    check_own(directory, remedy)


def check_own(directory: Path, remedy: str) -> None:
    """Checks that a directory is this user's, and that nobody else can put another one in its place.

    Raises:
        OSError: it is not, or is not there; the text says whose it is, and the remedy.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{directory} is a link or a file, not a directory; {remedy}")
    if found.st_uid != _user():
        raise PermissionError(f"{directory} belongs to uid {found.st_uid}, not {_user()}; {remedy}")
    for path in directory.parents:
        # Whoever owns a directory on the way can exchange what is in it; in /tmp anybody can have been first.
        owner, open_to_all = path.lstat().st_uid, path.parent.stat().st_mode & stat.S_IWOTH
        if open_to_all and owner not in (0, _user()):
            raise PermissionError(f"{path}, above {directory.name}, belongs to uid {owner}; {remedy}")


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0  # Windows keeps temporary files by user
