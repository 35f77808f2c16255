"""Where one member is reached: found when it joins, and again when the address that it had is this machine's no more.

A container that is connected to its network again, or a host with another lease, comes back with another address. Its
door is opened there, and the member introduces itself anew: nobody looks for it there otherwise.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable

from paceline._address import Endpoint, listening_host, reachable_endpoint
from paceline.errors import CoordinatorUnreachable
from paceline.links.grpc_door import Door
from paceline.session.sockets import Sockets

__all__ = ["Whereabouts", "is_here"]

_log = logging.getLogger("paceline.session")


class Whereabouts:
    """Of one member; on the loop.

    Args:
        coordinator: its address.
        advertise: host or host:port at which peers reach this worker; None to find it.
        door: what is opened there.
        sockets: are told of the door's port.
    """

    def __init__(self, coordinator: Endpoint, advertise: str | None, door: Door, sockets: Sockets) -> None:
        self._coordinator = coordinator
        self._advertise = advertise
        self._door = door
        self._sockets = sockets
        self._address: Endpoint | None = None

    @property
    def address(self) -> Endpoint:
        """Where peers reach this worker; from the end of `settle` on."""
        assert self._address is not None
        return self._address

    async def settle(self, timeout: float, say: Callable[[str], None]) -> None:
        """Finds the address and opens the door there; arguments and errors as for `reachable_endpoint`.

        Raises:
            LinkUnavailable: the address cannot be bound.
        """
        where = await reachable_endpoint(self._coordinator, self._advertise, timeout, say)
        port = await self._door.start(listening_host(where, self._advertise), where.port)
        self._moved_in(where, port)

    async def renew(self, timeout: float, leave: Callable[[str], None]) -> bool:
        """Finds another address if the one before has gone, and opens the door there.

        What was told to advertise stays: it may be an address of another machine, and the door is open to all.

        Args:
            timeout: seconds to wait for it.
            leave: is told, in a sentence, that links to the old address are of no use, before they break off; not if
                there is no other address to be had.

        Returns:
            Whether the address is another one now.

        Raises:
            CoordinatorUnreachable: none leads to the coordinator yet.
            LinkUnavailable: it cannot be bound.
        """
        if self._advertise or is_here(self.address.host):
            return False
        try:
            where = await reachable_endpoint(self._coordinator, None, timeout)
        except ValueError as error:  # the only address is one for this cable; the other may still come
            raise CoordinatorUnreachable(f"no way to the coordinator at {self._coordinator}: {error}") from error
        if where.host == self.address.host:  # it has come back this moment
            return False
        text = f"this worker's address was {self.address.host}, and is {where.host} now"
        _log.warning("%s", text)
        self._moved_in(where, await self._door.move(where.host, where.port, lambda: leave(text)))
        return True

    def _moved_in(self, where: Endpoint, port: int) -> None:
        self._address = Endpoint(where.host, where.port or port)
        self._sockets.listen(port)


def is_here(host: str) -> bool:
    """False if it is an IP address that no interface of this machine has.

    Names are taken at their word: what they stand for is not known here. So is whatever cannot be told.
    """
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
