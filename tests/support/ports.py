"""Ports for servers that start later, or again.

What the system gives out for port 0 it also gives to connections that leave, so a port of that range can be taken while
its server is away. These are below it.
"""

from __future__ import annotations

import os
import socket

__all__ = ["free_port"]

_FIRST, _END = 20_000, 32_000
_SHARE = 1_000
"""So many for each of pytest's processes, so that two never choose the same one."""

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_next = _worker * _SHARE % (_END - _FIRST)


def free_port(count: int = 1) -> int:
    """The first of so many ports in a row that nobody has."""
    global _next  # each is chosen once
    for _ in range(_SHARE):
        port = _FIRST + _next
        _next = _worker * _SHARE % (_END - _FIRST) + (_next + count) % _SHARE
        if all(map(_is_free, range(port, port + count))):
            return port
    raise AssertionError(f"no {count} free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
