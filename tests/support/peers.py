"""Gloo and Open MPI for tests that measure beside them: `make bench-peers` has an environment with both."""

from __future__ import annotations

from pathlib import Path

from paceline._base.terminal import UsageError
from peers import PEERS, check_peer
from support.needs import missing

__all__ = ["descendants", "need_peers"]


def need_peers() -> None:
    """Skips the test if an implementation to compare with is not there; fails it where peers are required."""
    for impl in PEERS:
        try:
            check_peer(impl)
        except UsageError as reason:
            missing("peers", f"{reason} (make bench-peers has both)")


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended since
            continue
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]
