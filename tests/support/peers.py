"""Gloo and Open MPI for tests that measure beside them: `make bench-peers` has an environment with both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline._base.terminal import UsageError
from peers import PEERS, check_peer

__all__ = ["descendants", "need_peers"]


def need_peers() -> None:
    """Skips the test, or fails it where REQUIRE_PEERS=1, if an implementation to compare with is not there."""
    for impl in PEERS:
        try:
            check_peer(impl)
        except UsageError as reason:
            if os.environ.get("REQUIRE_PEERS") == "1":
                pytest.fail(str(reason))
            pytest.skip(f"{reason} (make bench-peers has both; REQUIRE_PEERS=1 makes this a failure)")


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
