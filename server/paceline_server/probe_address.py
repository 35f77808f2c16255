"""Checks whether a member whose stream has ended still listens at its address."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import threading
from collections.abc import Callable

from paceline_server.blocking_calls import start_apart

__all__ = ["AddressProbes", "is_refused"]

_TIMEOUT_S = 1.0
"""Seconds for an answer. The host of a dead process refuses within microseconds; a host's silence proves nothing."""

_MOST_LOOK_UPS = 16
"""The most names that are looked up at a time: each takes a thread, which a resolver in trouble holds for seconds."""

_look_ups = threading.BoundedSemaphore(_MOST_LOOK_UPS)


async def is_refused(address: str) -> bool:
    """Returns True if the host answers that no process listens on the port.

    Returns False if the address cannot be resolved or reached, or answers late: the network may be at fault.

    Args:
        address: "host:port".
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return False
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            refused = [await _refuses(ip, int(port)) for ip in await _addresses(host.strip("[]"))]
    except (OSError, ValueError, OverflowError):  # TimeoutError is an OSError
        return False
    return bool(refused) and all(refused)


class AddressProbes:
    """The checks that are in progress on the running loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def at(self, address: str, refused: Callable[[], None]) -> None:
        """Calls `refused` if no process listens at the address."""
        task = asyncio.ensure_future(self._knock(address, refused))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancels the checks."""
        for task in self._tasks:
            task.cancel()

    async def _knock(self, address: str, refused: Callable[[], None]) -> None:
        if await is_refused(address):
            refused()


async def _refuses(ip: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(ip, port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def _addresses(host: str) -> set[str]:
    """Returns the addresses of a host.

    Raises:
        OSError: the name does not resolve, or too many names are being looked up.
        ValueError: it is no valid name.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return {host}
    if not _look_ups.acquire(blocking=False):
        raise OSError("too many names are being looked up")
    try:
        answer = start_apart(functools.partial(_look_up, host), "paceline-lookup")
    except RuntimeError as error:  # there are too many threads
        _look_ups.release()
        raise OSError(str(error)) from None
    return await asyncio.wrap_future(answer)


def _look_up(host: str) -> set[str]:
    try:
        return {str(target[0]) for *_, target in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    finally:
        _look_ups.release()
