"""What one process of each host does for all of them, such as a download. It needs no rank, no session and no group."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["once_per_host"]

_log = logging.getLogger("paceline.once")

_DONE = b"done\n"
"""What the file holds once a block has ended well."""


@contextmanager
def once_per_host(path: str | os.PathLike[str]) -> Iterator[bool]:
    """Runs a block in one process at a time, and says whether it has yet to be done.

        with paceline.once_per_host("data/downloaded") as first:
            if first:
                download("data")

    The first process gets True. The others wait until its block has ended, and get False. If the block raises, or its
    process dies, the next process gets True. A file at `path` has the lock, and remembers that the block has ended
    well; delete it to have the block run again. On a disk of the host, that is once for the host; on one that hosts
    share, once for all of them, if the file system has locks that hold between hosts (NFS 4 does).

    Call it before `join`, so that nobody waits in the job meanwhile. A lock ends when all processes that have it are
    gone: those that the block forks have it, too.

    Args:
        path: of that file, which nothing else uses. Its folder is made if it is not there.

    Raises:
        OSError: the file cannot be made, or its file system has no locks.
    """
    import fcntl  # absent on Windows

    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for the process that has %s", path)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        first = os.fstat(descriptor).st_size == 0
        yield first
        if first:
            os.write(descriptor, _DONE)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
