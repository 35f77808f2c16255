"""Ports for servers that start later, or again.

What the system gives out for port 0 it also gives to connections that leave, so a port of that range can be taken while
its server is away. These are below it.

They are divided into shares. A process of pytest takes a share when it first needs a port, and keeps it until it ends:
it binds the share's first port, which no other process can bind then. So any number of runs of pytest at once, with
any number of processes each, never choose the same port.
"""

from __future__ import annotations

import socket

__all__ = ["Share", "free_port"]

_FIRST, _END = 20_000, 32_000
_SIZE = 250
"""Ports in a share. There are 48 shares, and a run of pytest has 8 processes at most."""


class Share:
    """Ports that belong to one process."""

    def __init__(self) -> None:
        """Takes the first share that nobody has.

        Raises:
            AssertionError: All are taken.
        """
        self._held = socket.socket()  # bound, but not listening: this is what says that the share is taken
        for first in range(_FIRST, _END, _SIZE):
            try:
                self._held.bind(("", first))
            except OSError:
                continue
            self.first = first
            self._next = 1
            return
        self._held.close()
        raise AssertionError(f"all {(_END - _FIRST) // _SIZE} shares of ports are taken: is anything left running?")

    def free_port(self, count: int = 1) -> int:
        """The first of so many ports in a row that nobody has."""
        for _ in range(_SIZE):
            if self._next + count > _SIZE:
                self._next = 1
            port = self.first + self._next
            self._next += count
            if all(map(_is_free, range(port, port + count))):
                return port
        raise AssertionError(f"no {count} free ports in a row")

    def give_back(self) -> None:
        """Lets others take this share."""
        self._held.close()


_share: Share | None = None


def free_port(count: int = 1) -> int:
    """The first of so many ports in a row that nobody has; each is chosen once, until all have been."""
    global _share
    if _share is None:
        _share = Share()
    return _share.free_port(count)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
