"""The address of a member: found when it joins, and again when this machine no longer has it; and its sockets.

A container that is connected to its network again, or a host with a new lease, comes back with another address. The
member opens its door there and introduces itself anew, because otherwise no peer would look for it there. `Sockets`
tells `_fork` which connections belong to the session, by the IP addresses that the kernel knows.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from paceline._base.addresses import CoordinatorAddresses, Endpoint, listening_host, look_up_all, reachable_endpoint
from paceline._base.processes import protect
from paceline._links.grpc_door import Door
from paceline.errors import CoordinatorUnreachable

_log = logging.getLogger("paceline.session")

_EACH_S = 0.5
"""Seconds for a route to one of several coordinators to be found, before the next one is tried."""


class Whereabouts:
    """The address of one member, and the door that is opened there; used on the loop.

    `advertise` is the host or host:port at which peers reach this worker; None to find it. `sockets` are told the
    door's port.
    """

    def __init__(self, coordinators: CoordinatorAddresses, advertise: str | None, door: Door, sockets: Sockets) -> None:
        self._coordinators = coordinators
        self._advertise = advertise
        self._door = door
        self._sockets = sockets
        self._address: Endpoint | None = None

    @property
    def address(self) -> Endpoint:
        """The address at which peers reach this worker; known once `open_door` has returned."""
        assert self._address is not None
        return self._address

    async def open_door(self, timeout: float, say: Callable[[str], None]) -> None:
        """Opens the door at the address that `reachable_endpoint` finds; raises `LinkUnavailable` if it cannot."""
        where = await self._find(self._advertise, timeout, say)
        port = await self._door.start(listening_host(where, self._advertise), where.port)
        self._moved_in(where, port)

    async def renew(self, timeout: float, leave: Callable[[str], None]) -> bool:
        """Finds another address if the present one has gone, and opens the door there; returns whether it has changed.

        An advertised address stays, since it may be another machine's; the door listens on all interfaces then. `leave`
        is called with a sentence before links to the old address are broken; not called if there is no other address.

        Raises `CoordinatorUnreachable` if no address leads to the coordinator yet, and `LinkUnavailable` if the new one
        cannot be bound.
        """
        if self._advertise or is_here(self.address.host):
            return False
        try:
            where = await self._find(None, timeout)
        except ValueError as error:  # the only address is link-local; another may still come
            raise CoordinatorUnreachable(f"cannot reach the coordinator at {self._coordinators}: {error}") from error
        if where.host == self.address.host:  # the old address has just come back
            return False
        text = f"this worker's address was {self.address.host} and is {where.host} now"
        _log.warning("%s", text)
        self._moved_in(where, await self._door.move(where.host, where.port, lambda: leave(text)))
        return True

    async def _find(
        self, advertise: str | None, timeout: float, say: Callable[[str], None] = lambda _: None
    ) -> Endpoint:
        """Finds the address by the first coordinator to which a route leads; see `reachable_endpoint`."""
        if not self._coordinators.several:
            return await reachable_endpoint(self._coordinators.current, advertise, timeout, say)
        deadline = time.monotonic() + timeout
        while True:
            for coordinator in self._coordinators:
                left = max(0.0, min(_EACH_S, deadline - time.monotonic()))
                try:
                    return await reachable_endpoint(coordinator, advertise, left, say)
                except CoordinatorUnreachable:
                    if time.monotonic() >= deadline:
                        raise

    def _moved_in(self, where: Endpoint, port: int) -> None:
        self._address = Endpoint(where.host, where.port or port)
        self._sockets.listen(port)


def is_here(host: str) -> bool:
    """False if this is an IP address that no interface of this machine has; True for names, and if unknown."""
    try:
        ((family, kind, protocol, _, target), *_) = socket.getaddrinfo(
            host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )
    except OSError:
        return True
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


class Sockets:
    """The sockets of one session; used on the loop. What `start` starts is cancelled before `forget`."""

    def __init__(self, start: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._start = start
        self._listening_port = 0
        self._dialled: list[Endpoint] = []
        self._addresses: dict[str, set[str]] = {}  # the IP addresses of each name

    def listen(self, port: int) -> None:
        """Notes the port that peers dial."""
        self._listening_port = port

    def dial(self, endpoints: Iterable[Endpoint]) -> None:
        """Notes the endpoints that the session dials from now on, in place of earlier ones.

        The addresses of names follow once they are looked up, since a view must not wait for a slow resolver.
        """
        self._dialled = list(endpoints)
        self._tell()
        if names := {endpoint.host for endpoint in self._dialled if endpoint.ip is None}:
            self._start(self._learn(names))

    def forget(self) -> None:
        """Forgets all sockets, because the session is over."""
        protect(id(self), listening_port=0, dialled=set())

    async def _learn(self, names: set[str]) -> None:
        found = await look_up_all(names)
        self._addresses.update({name: addresses for name, addresses in found.items() if addresses})
        self._tell()

    def _tell(self) -> None:
        known = [(self._addresses.get(e.host, set()) if e.ip is None else {e.ip}, e.port) for e in self._dialled]
        dialled = {(address, port) for addresses, port in known for address in addresses}
        protect(id(self), listening_port=self._listening_port, dialled=dialled)
