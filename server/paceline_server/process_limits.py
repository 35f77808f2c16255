"""The limits of the coordinator's process: its memory, one heap, short stops for garbage, and as many files as allowed.

*Memory.* The process's cgroup sets the limit, or else what the machine has.

*One heap.* glibc gives each of grpc's threads an arena of its own; memory that is freed in one arena is no use to
another. The process grew by 20 to 100 MB with each 10,000 connections that were opened and closed. With one arena it
stops growing after the first 10,000. The coordinator's threads mostly wait, so they do not contend for the arena.

*Garbage.* A full garbage collection looks at all objects, and the loop stands still meanwhile: 0.1 s with 600 sessions.
It finds little, because what we keep for a call does not refer to itself. So full collections are rare.

*Files.* Every connection is a file. The usual soft limit of 1,024 is for programs that call select(2); the hard limit
is what the operator wants.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_M_ARENA_MAX = -8
"""The constant of malloc.h; see mallopt(3)."""

_THRESHOLDS = (5_000, 10, 20)
"""For `gc.set_threshold`. A full collection comes after a million new objects at the soonest, some 0.1 GB; by default
after 70,000, which 600 sessions take. grpc leaves 3 to 5 objects of each call that refer to themselves; they are found
while they are young."""


def share_one_heap() -> None:
    """Limits malloc to one arena; call it before any thread starts. Only glibc has arenas to limit."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def collect_rarely() -> None:
    """Makes full garbage collections rare, and has them pass over what is there now; call it after the start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def usable_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that this process may use."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """Yields the limits of this process's cgroups in bytes: cgroup v2's memory.max, v1's memory.limit_in_bytes."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # another system than Linux
        return
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        here = base / path.lstrip("/")
        # In a container the path may be the host's, while the container's own group is mounted.
        for folder in {base, here, *(each for each in here.parents if each.is_relative_to(base))}:
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():  # else "max"
                yield int(text)
