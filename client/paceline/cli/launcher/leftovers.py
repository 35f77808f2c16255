"""Removes what killed processes of this user have left in `paceline-UID` of the directory for temporary files.

A worker that is killed leaves its flight records, and a launcher that is killed leaves the file by which commands find
its coordinator, and what its workers have compiled. Each goes if it is older than a day and its process is gone.
(Workers remove each other's stack files: see `_session.stack_file`.)
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline._base.processes import check_own, make_private, user_folder

OLD_S = 86_400.0
"""Age in seconds from which a file may go: until then its user may want to read it."""

_COMPILED = "compiled"

_RECORD = re.compile(r".*\.pid([0-9]+)\.json(\.\w+\.tmp)?", re.ASCII)
"""Name of a flight record (`_session.flight`)."""


def remove_leftovers(now: float | None = None) -> None:
    """Removes old files of processes that are gone. It follows no links, and leaves what it cannot remove."""
    before = (time.time() if now is None else now) - OLD_S
    for name, is_in_use in (("flight", _has_process), ("coordinators", _is_locked), (_COMPILED, _is_locked)):
        with suppress(OSError):  # there is no such folder, or it is not this user's own
            _sweep(user_folder(name), before, is_in_use)


@contextmanager
def compile_folder() -> Iterator[Path | None]:
    """Makes a folder for what a launcher's workers compile, if it can, and removes it at the end of the block."""
    try:
        parent = user_folder(_COMPILED)
        make_private(parent, "workers compile into torch's own folder")
        folder = Path(tempfile.mkdtemp(dir=parent))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(directory: Path, before: float, is_in_use: Callable[[str, int], bool]) -> None:
    check_own(directory, "nothing in it is removed")
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in os.listdir(folder):
            with suppress(OSError):  # another launcher was faster
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                is_folder = directory.name == _COMPILED
                is_own = stat.S_IFMT(found.st_mode) == (stat.S_IFDIR if is_folder else stat.S_IFREG)
                if found.st_uid != os.geteuid() or not is_own or found.st_mtime >= before or is_in_use(name, folder):
                    continue
                if is_folder:
                    shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
                else:
                    os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)


def _has_process(name: str, folder: int) -> bool:
    """True if the process of a flight record may still run, or the file is no flight record."""
    record = _RECORD.fullmatch(name)
    return record is None or Path(f"/proc/{record[1]}").exists()


def _is_locked(name: str, folder: int) -> bool:
    """True if the launcher that has published this address (`paceline.launch`), or made this folder, still runs."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
