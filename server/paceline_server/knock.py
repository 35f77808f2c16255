"""Is anybody at that address? Asked of a member whose stream has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Knocks", "is_refused"]

_TIMEOUT_S = 1.0
"""A process that is gone is known in microseconds; of a host that is gone, silence says nothing anyway."""


async def is_refused(address: str) -> bool:
    """True if a host is there and says that nobody listens on the port.

    Not if the address cannot be resolved or reached, or answers late: then it is the network that is in doubt.

    Args:
        address: "host:port".
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return False
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, OverflowError):
        return False
    writer.close()
    return False


class Knocks:
    """Questions under way, on the running loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def at(self, address: str, refused: Callable[[], None]) -> None:
        """Calls `refused` if nobody listens there."""
        task = asyncio.ensure_future(self._knock(address, refused))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Nobody is interested any more."""
        for task in self._tasks:
            task.cancel()

    async def _knock(self, address: str, refused: Callable[[], None]) -> None:
        if await is_refused(address):
            refused()
