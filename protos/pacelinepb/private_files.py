"""Checks which users may read a file that holds a secret. Both the coordinator and the workers use it.

The rule is that of libpq and of PostgreSQL's server for key files. A file of this process's user must be for that user
alone (0600). A file of root or of another user may be open to its group (0640), through which this process reads it;
so Kubernetes mounts a secret for its `fsGroup`. A file that everybody may read is refused, regardless of its owner.
Source: https://www.postgresql.org/docs/current/ssl-tcp.html, "Basic Setup".
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

__all__ = ["FileTooOpen", "check_private", "read_own", "read_private"]


class FileTooOpen(ValueError):
    """Others may read or change a file that holds a secret; the text has its name, its mode and what to run."""


def check_private(path: Path, status: os.stat_result, user: int) -> None:
    """Checks the mode of a file.

    Args:
        path: path of the file, for the text.
        status: the status of the file. A file without a name (`/dev/fd/3`) passes, and so does anything but a regular
            file: there are no other readers to fear.
        user: the effective user id of this process.

    Raises:
        FileTooOpen: more users may read or write the file than should.
    """
    if not stat.S_ISREG(status.st_mode) or not status.st_nlink:
        return
    own = status.st_uid == user != 0
    mode = stat.S_IMODE(status.st_mode)
    if mode & (0o077 if own else 0o007):
        who = "everybody on this machine" if mode & 0o007 else "its group"
        mend = "600" if status.st_uid == user else "o-rwx"
        raise FileTooOpen(
            f"{path} holds a secret, and its mode {mode:04o} opens it to {who}: run "
            f"chmod {mend} {shlex.quote(str(path))}, and replace the secret if others use this machine"
        )


def read_private(path: Path, most: int = -1) -> bytes:
    """Reads a file that holds a secret.

    Args:
        path: path of the file.
        most: the most bytes to read; all if negative.

    Raises:
        FileTooOpen: more users may read or write the file than should.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        check_private(path, os.fstat(file.fileno()), os.geteuid())
        return file.read(most)


def read_own(file: int, path: Path, most: int) -> bytes:
    """Reads a file that a process of this user has made for the user's other processes; stricter than `read_private`.

    Args:
        file: a descriptor, opened without following a link and without waiting for a FIFO's writer.
        path: path of the file, for the text.
        most: the most bytes to read.

    Raises:
        FileTooOpen: it is no regular file, belongs to another user, or others may read or write it.
        OSError: the file cannot be read.
    """
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise FileTooOpen(
            f"{path} must be a file of uid {os.geteuid()} with mode 0600, but its uid is {status.st_uid} and its mode "
            f"{stat.S_IMODE(status.st_mode):04o}"
        )
    return os.pread(file, most, 0)
