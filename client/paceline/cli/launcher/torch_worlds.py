"""Gives each replica of a launcher, or all of its workers, a world of torch.distributed with a port of its own."""

from __future__ import annotations

import socket
import sys

from paceline.launch._environment import torch_world


class TorchWorlds:
    """The present world of each `size` workers in a row, such as a replica; a new one whenever they start again.

    A port is bound here, but not listened at, while its replica runs: nobody else gets it, whereas Linux lets the
    replica's rank 0 listen there, because both set SO_REUSEADDR, as torch's store does. Other systems do not, so there
    the port is free until then.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: dict[int, socket.socket] = {}
        self._ports: dict[int, int] = {}

    def environment(self, index: int) -> dict[str, str]:
        """Returns what the next process of this number finds; the first of a replica makes a new world.

        Raises:
            OSError: no port is free, or the launcher has too many files.
        """
        replica, position = divmod(index, self._size)
        if not position:
            # the old port is held until the new one is there, so that they differ
            before, self._held[replica] = self._held.get(replica), _free_port()
            if before is not None:
                before.close()
            self._ports[replica] = self._held[replica].getsockname()[1]
            if sys.platform != "linux":
                self._held[replica].close()
        return torch_world(index, self._size, self._ports[replica])

    def close(self) -> None:
        """Gives all ports back."""
        for held in self._held.values():
            held.close()
        self._held.clear()


def _free_port() -> socket.socket:
    """Returns a socket that is bound to a free port of all addresses of this host, at which torch's store listens."""
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
    except OSError:
        held.close()
        raise
    return held
