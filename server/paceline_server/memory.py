"""How much memory this process may use: the limit of its cgroup, or what the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["usable_bytes"]


def usable_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may use.

    Args:
        root: where /proc and /sys are.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """Those of the cgroups that this process is in, in bytes: cgroup v2's memory.max, v1's memory.limit_in_bytes."""
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
        # In a container the path may be the host's, and what is mounted is the container's own group.
        for folder in {base, here, *(each for each in here.parents if each.is_relative_to(base))}:
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():  # else "max"
                yield int(text)
