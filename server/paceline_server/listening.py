"""Opens the address that the coordinator listens at: looks up its name, asks the kernel, and then grpc.

grpc would look up a name on the loop's thread, for as long as that takes; so grpc gets addresses only.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

from paceline_server._grpc import aio, grpc
from paceline_server.blocking_calls import call_apart

LOOK_UP_S = 10.0
"""The most seconds for the look-up of a name."""

_Target = tuple[socket.AddressFamily, tuple[Any, ...]]


class PortInUse(OSError):
    """Another process listens at the address already; the text names the address."""


async def listen(server: aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> list[tuple[str, int]]:
    """Makes the server listen at host:port, at all addresses of a name; returns them, each with its port.

    Port 0 takes a free port. Raises `PortInUse`, or OSError if listening fails for another reason, or the name is not
    looked up within `LOOK_UP_S`.
    """
    host, _, port = address.rpartition(":")
    host, bound = host.strip("[]"), int(port)
    targets = await targets_of(address, host, bound)
    check_free(address, targets)
    ips = list(dict.fromkeys(str(target[0]) for _, target in targets))
    for ip in ips:
        bound = _add_port(server, f"[{ip}]:{bound}" if ":" in ip else f"{ip}:{bound}", credentials)
    return [(ip, bound) for ip in ips]


async def targets_of(address: str, host: str, port: int, *, look_up_s: float = LOOK_UP_S) -> list[_Target]:
    """Returns the addresses of a host; `address` is for the error's text."""

    def look_up(flags: int = 0) -> list[_Target]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, target) for family, _, _, _, target in found]

    try:
        try:
            return look_up(socket.AI_NUMERICHOST)
        except socket.gaierror:
            return await call_apart(look_up, "paceline-lookup", look_up_s)  # the host is a name
    except TimeoutError:
        text = f"cannot listen on {address}: looking up its name took longer than {look_up_s:g} s; give an IP address"
        raise OSError(errno.ETIMEDOUT, text) from None
    except OSError as cause:
        raise OSError(cause.errno, f"cannot listen on {address}: {cause.strerror}") from None
    except ValueError as cause:  # a label is empty or too long, or there is a null character
        raise OSError(errno.EINVAL, f"cannot listen on {address}: {cause}") from None


def check_free(address: str, targets: list[_Target]) -> None:
    """Asks the kernel first: grpc would say only that it failed, and write a line of its own to the terminal."""
    try:
        for family, target in targets:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
                probe.listen()
    except OSError as cause:
        if cause.errno == errno.EADDRINUSE:
            raise PortInUse(cause.errno, f"{address} is in use: is a coordinator running there already?") from None
        raise OSError(cause.errno, f"cannot listen on {address}: {cause.strerror}") from None


def _add_port(server: aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if not port:  # the port was free a moment ago
        raise PortInUse(errno.EADDRINUSE, f"cannot listen on {address}: another process has just taken the port")
    return port
