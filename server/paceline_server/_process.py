"""What a coordinator in a process of its own sets for itself: one heap, and as many files as it may have.

*One heap.* grpc's threads each get an arena of their own from glibc; what is freed in one is no use to another. After
each 10,000 connections, opened and left, the process had grown by 20 to 100 MB. With one arena it stays where the first
ones have left it. The coordinator's threads mostly wait, so they do not contend for it.

*Files.* Every connection is one. The usual soft limit of 1,024 is for programs that call select(2); the hard limit is
what the operator means.
"""

from __future__ import annotations

import ctypes
import resource
import sys

__all__ = ["raise_file_limit", "share_one_heap"]

_M_ARENA_MAX = -8
"""malloc.h; mallopt(3)."""


def share_one_heap() -> None:
    """Before any thread is started. Other C libraries than glibc have no arenas to limit."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
