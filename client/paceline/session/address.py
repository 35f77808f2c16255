"""Addresses: reading "host:port", and finding the address at which peers reach this worker."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass

from paceline.errors import CoordinatorUnreachable

__all__ = ["DEFAULT_PORT", "Endpoint", "parse_endpoint", "reachable_endpoint", "resolve"]

DEFAULT_PORT = 7400
"""Where a coordinator listens unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name or IP literal, without brackets) and a port; port 0 asks for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_endpoint(text: str, *, default_port: int | None = None) -> Endpoint:
    """Reads "host:port", "[::1]:port", or "host" where a default port is given.

    Raises:
        ValueError: the text is not of that form; it says what is wrong.
    """
    host, colon, port = text.rpartition(":")
    if (not colon or "]" in port) and default_port is not None:
        host, port = text, str(default_port)
    if not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is not an address of the form host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, [address]:port")
    if not host or "[" in host or "]" in host:
        raise ValueError(f"{text!r} is not an address of the form host:port: its brackets hold no host")
    return Endpoint(host, int(port))


async def reachable_endpoint(coordinator: Endpoint, advertise: str | None) -> Endpoint:
    """Where peers can reach this worker.

    `advertise` if given; otherwise the address of the interface that leads to the coordinator: whoever reaches the
    coordinator reaches that network. A coordinator on loopback keeps the worker on loopback.

    Raises:
        ValueError: `advertise` is malformed.
        CoordinatorUnreachable: the coordinator's host name does not resolve, or no route leads to it.
    """
    if advertise:
        return parse_endpoint(advertise, default_port=0)
    if coordinator.is_loopback:
        return Endpoint("127.0.0.1" if coordinator.host == "localhost" else coordinator.host, 0)
    loop = asyncio.get_running_loop()
    try:
        # A connected UDP socket sends nothing; it only asks the routing table. The look-up runs on a thread.
        found = await loop.getaddrinfo(coordinator.host, coordinator.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return Endpoint(str(probe.getsockname()[0]), 0)
    except OSError as error:
        raise CoordinatorUnreachable(f"no way to the coordinator at {coordinator}: {error}") from error


async def resolve(hosts: set[str]) -> dict[str, set[str]]:
    """The IP addresses of each host; none for a name that does not resolve. Look-ups run on threads."""

    async def look_up(host: str) -> set[str]:
        try:
            return {str(ipaddress.ip_address(host))}
        except ValueError:
            pass  # a name
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            return set()
        return {str(target[0]) for *_, target in found}

    names = sorted(hosts)
    return dict(zip(names, await asyncio.gather(*map(look_up, names)), strict=True))
