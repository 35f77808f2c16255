"""`once_per_host`: work that one process of each host does for all, such as a download, before any of them joins."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["once_per_host"]

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
    hosts share, once for all of them, provided that its locks hold between hosts (those of NFS 4 do).

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
