"""Which sockets belong to a session: told to `_fork`, by the IP addresses that the kernel knows them by."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from paceline._address import Endpoint
from paceline._fork import protect
from paceline._lookup import look_up_all

__all__ = ["Sockets"]


class Sockets:
    """Of one session; on the loop.

    Args:
        start: runs a coroutine beside what is going on; it is cancelled before `forget`.
    """

    def __init__(self, start: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._start = start
        self._listening_port = 0
        self._dialled: list[Endpoint] = []
        self._addresses: dict[str, set[str]] = {}  # of names

    def listen(self, port: int) -> None:
        """Peers dial this port."""
        self._listening_port = port

    def dial(self, endpoints: Iterable[Endpoint]) -> None:
        """The session dials these from now on, and no others.

        Those of names follow when they are looked up: a view must not wait for a slow resolver.
        """
        self._dialled = list(endpoints)
        self._tell()
        if names := {endpoint.host for endpoint in self._dialled if endpoint.ip is None}:
            self._start(self._learn(names))

    def forget(self) -> None:
        """The session is over."""
        protect(id(self), listening_port=0, dialled=set())

    async def _learn(self, names: set[str]) -> None:
        found = await look_up_all(names)
        self._addresses.update({name: addresses for name, addresses in found.items() if addresses})
        self._tell()

    def _tell(self) -> None:
        known = [(self._addresses.get(e.host, set()) if e.ip is None else {e.ip}, e.port) for e in self._dialled]
        dialled = {(address, port) for addresses, port in known for address in addresses}
        protect(id(self), listening_port=self._listening_port, dialled=dialled)
