"""This process and others of its host: forks, this user's own folders, and work that one does for all.

**Forks.** A child inherits the parent's sockets and holds them open: peers and the coordinator would notice the
parent's SIGKILL only when the child ends. So the child points the inherited sockets of sessions at /dev/null (dup2, not
close: grpc's own tables still refer to the numbers). It finds them by their endpoints, and leaves a user's own sockets
alone. And what the parent has left to its garbage collector stays there: a child that frees channels of grpc waits for
ever for threads that it does not have.

**Folders** in the directory for temporary files are checked, because other users can write there too.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import ForkedSession

Endpoints = set[tuple[str, int]]
"""(IP, port) pairs."""

_lock = threading.Lock()
_listening: dict[int, int] = {}
_dialled: dict[int, Endpoints] = {}
_registered = False


_forked = False


def check_process() -> None:
    """Checks that this is the process that joined; raises ForkedSession in a forked child of it."""
    if _forked:
        raise ForkedSession(
            "this process was forked from one that has joined a job: the session belongs to the parent, and grpc does "
            "not survive a fork. Use the session in the parent only, or start the child with the 'spawn' method and "
            "let it join for itself"
        )


def protect(key: int, *, listening_port: int, dialled: Endpoints) -> None:
    """Registers the sockets of a session for a child to close, or changes what was registered under its key.

    `listening_port` is the port that its peers dial; 0 forgets the session. It dials `dialled`: coordinator and peers.
    """
    global _registered
    with _lock:
        if not listening_port:
            _listening.pop(key, None)
            _dialled.pop(key, None)
            return
        _listening[key] = listening_port
        _dialled[key] = set(dialled)
        if not _registered and hasattr(os, "register_at_fork"):
            os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_in_child)
            _registered = True


def _after_in_child() -> None:
    global _forked
    _forked = True
    gc.freeze()
    ports, dialled = set(_listening.values()), set().union(*_dialled.values())
    _listening.clear()
    _dialled.clear()
    _lock.release()
    if not ports:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for entry in Path("/proc/self/fd").iterdir():
        if _belongs(int(entry.name), ports, dialled):
            os.dup2(null, int(entry.name), inheritable=False)
    os.close(null)


def _belongs(fd: int, ports: set[int], dialled: Endpoints) -> bool:
    try:
        probe = socket.socket(fileno=fd)
    except OSError:  # not a socket, or the descriptor that lists this folder
        return False
    try:
        if probe.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if probe.getsockname()[1] in ports:
            return True
        host, port = probe.getpeername()[:2]
        return (host.removeprefix("::ffff:"), port) in dialled
    except OSError:  # not connected
        return False
    finally:
        probe.detach()


def user_folder(name: str) -> Path:
    """Returns the path `paceline-UID/NAME` in the directory for temporary files, without creating it.

    Raises FileNotFoundError if there is no writable directory for temporary files.
    """
    return Path(tempfile.gettempdir(), f"paceline-{_user()}", name).absolute()


def make_private(directory: Path, remedy: str) -> None:
    """Creates a directory and its missing parents, mode 0700; refuses one that another user could have put there.

    Raises OSError, as `check_own` does; its text ends with the remedy.
    """
    missing = [path for path in (directory, *directory.parents) if not os.path.lexists(path)]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)  # exist_ok: another process may be doing the same
    check_own(directory, remedy)


def check_own(directory: Path, remedy: str) -> None:
    """Checks that a directory belongs to this user, and that no other user can replace it.

    Raises OSError if not, or if it does not exist; the text names the owner and the remedy.
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


_log = logging.getLogger("paceline.once")

_DONE = b"done\n"
"""The file's content after a block has succeeded."""


@contextmanager
def once_per_host(path: str | os.PathLike[str]) -> Iterator[bool]:
    """Runs a block in one process at a time; yields True if the work has not been done yet.

        with paceline.once_per_host("data/downloaded") as first:
            if first:
                download("data")

    The first process gets True. The others wait until its block has ended, and get False. If the block raises or its
    process dies, the next process gets True. The file at `path` carries the lock and records that a block has
    succeeded; delete it to have the work done again. On a local disk, that is once per host; on a file system that
    hosts share, once for all of them, provided that its locks hold between hosts (NFS 4's do).

    Call it before `join`, so that no other worker waits in the job meanwhile. The lock is released when all processes
    that hold it have ended; child processes that the block forks hold it too.

    Args:
        path: a file for this purpose alone. Its folder is created if it does not exist.

    Raises:
        OSError: the file cannot be created, or its file system has no locks.
    """
    import fcntl  # absent on Windows

    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for the process that holds the lock on %s", path)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        first = os.fstat(descriptor).st_size == 0
        yield first
        if first:
            os.write(descriptor, _DONE)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
