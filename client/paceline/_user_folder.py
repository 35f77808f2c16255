"""This user's own folders in the directory for temporary files, checked because other users can write there too."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

__all__ = ["check_own", "make_private", "user_folder"]


def user_folder(name: str) -> Path:
    """Returns the path `paceline-UID/NAME` in the directory for temporary files, without creating it.

    Raises:
        FileNotFoundError: there is no writable directory for temporary files.
    """
    return Path(tempfile.gettempdir(), f"paceline-{_user()}", name).absolute()


def make_private(directory: Path, remedy: str) -> None:
    """Creates a directory and its missing parents, mode 0700; refuses one that another user could have put there.

    Args:
        directory: its absolute path.
        remedy: advice with which an error's text ends.

    Raises:
        OSError: the directory cannot be created, or `check_own` refuses it.
    """
    missing = [path for path in (directory, *directory.parents) if not os.path.lexists(path)]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)  # exist_ok: another process may be doing the same
    check_own(directory, remedy)


def check_own(directory: Path, remedy: str) -> None:
    """Checks that a directory belongs to this user, and that no other user can replace it.

    Raises:
        OSError: it does not, or it does not exist; the text names the owner and the remedy.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{directory} is a link or a file, not a directory; {remedy}")
    if found.st_uid != _user():
        raise PermissionError(f"{directory} belongs to uid {found.st_uid}, not {_user()}; {remedy}")
    for path in directory.parents:
        # The owner of a directory above can replace what is in it; in /tmp, any user may have created it.
        owner, open_to_all = path.lstat().st_uid, path.parent.stat().st_mode & stat.S_IWOTH
        if open_to_all and owner not in (0, _user()):
            raise PermissionError(f"{path}, above {directory.name}, belongs to uid {owner}; {remedy}")


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0  # Windows keeps temporary files by user
