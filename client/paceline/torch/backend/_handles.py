"""Handles of members of a reconfigurable group, and checks whether a member's process still exists.

A member answers every connection to a port of its own with its name. So a process that has ended can be told from a
slow one: its port refuses connections, or another process answers. An open connection shows when the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline._base.addresses import Endpoint, is_exhausted, look_up, parse_endpoint
from paceline._base.processes import protect

_SCHEME = "paceline://"

_PROBE_S = 1.0
"""Seconds to wait for a member's name. A silent member does not count as dead: it may be frozen or far away."""

_MAX_PROBES = 64
"""Number of members that are asked for their name at the same time."""

_BACKLOG = 1024
"""Number of connections that may wait to be accepted."""

_MEMBER_BYTES = 8


class Handle(NamedTuple):
    """A member's address and name, as text "paceline://host:port/presence_port/member".

    The member's coordinator listens at the address. At the presence port the member answers with its name, which is
    random, so that no other process has it.
    """

    address: Endpoint
    presence_port: int
    member: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.address}/{self.presence_port}/{self.member}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Parses a handle; ValueError if the text is none."""
        parts = text.removeprefix(_SCHEME).split("/")
        if text.startswith(_SCHEME) and len(parts) == 3 and len(parts[2]) == 2 * _MEMBER_BYTES and parts[2].isalnum():
            address, port = parse_endpoint(parts[0]), parts[1]
            if port.isascii() and port.isdigit() and int(port) < 1 << 16:
                return cls(address, int(port), parts[2])
        raise ValueError(f"{text!r:.100} is not a handle of this backend, {_SCHEME}host:port/presence_port/member")


class Presence:
    """Answers connections to this member's presence port with its name. Its methods run on the loop."""

    def __init__(self) -> None:
        self.member = secrets.token_hex(_MEMBER_BYTES)
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.BaseTransport] = set()

    async def open(self, host: str) -> None:
        """Starts to answer connections at an IP address of this host; "::" for all its addresses, including IPv4."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
        loop = asyncio.get_running_loop()
        answer = functools.partial(_Answer, self.member, self._connections)
        self._server = await loop.create_server(answer, sock=listening, backlog=_BACKLOG)
        self.port = listening.getsockname()[1]
        protect(id(self), listening_port=self.port, dialled=set())

    async def close(self) -> None:
        """Stops answering, and closes all connections."""
        protect(id(self), listening_port=0, dialled=set())
        if self._server is not None:
            self._server.close()
        for transport in list(self._connections):
            transport.close()


class _Answer(asyncio.Protocol):
    """Sends the name, and keeps the connection open, so that it ends when this process ends."""

    def __init__(self, member: str, connections: set[asyncio.BaseTransport]) -> None:
        self._member, self._connections = member, connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._connections.add(transport)
        transport.write(self._member.encode())

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self._transport)


class PresenceWatcher:
    """Finds members whose process has ended, and notices when one ends. Its methods run on the loop."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        self._probes = asyncio.Semaphore(_MAX_PROBES)
        self._ends: dict[int, asyncio.Task[bool]] = {}

    async def find_gone(self) -> list[int]:
        """Returns the positions of members that have certainly ended: their port has another process, or none.

        Raises:
            OSError: this process has no file descriptor left to connect with.
        """
        answers = await asyncio.gather(*(self._is_gone(rank) for rank in range(len(self._handles))))
        return [rank for rank, gone in enumerate(answers) if gone]

    async def watch(self, on_gone: Callable[[int], None]) -> None:
        """Calls a function from now on with the position of each member whose process ends.

        It also watches members that did not answer `find_gone`.
        """

        def report(rank: int, end: asyncio.Task[bool]) -> None:
            if not end.cancelled() and end.exception() is None and end.result():
                on_gone(rank)

        for rank, end in self._ends.items():
            end.add_done_callback(functools.partial(report, rank))

    async def close(self) -> None:
        """Stops watching."""
        for end in self._ends.values():
            end.cancel()
        await asyncio.gather(*self._ends.values(), return_exceptions=True)

    async def _is_gone(self, rank: int) -> bool:
        there = asyncio.get_running_loop().create_future()
        async with self._probes:
            end = self._ends[rank] = asyncio.create_task(_end_of(self._handles[rank], there))
            await asyncio.wait([end, there], timeout=_PROBE_S, return_when=asyncio.FIRST_COMPLETED)
        return end.done() and end.result()


async def _end_of(handle: Handle, there: asyncio.Future[None]) -> bool:
    """Waits until a member's process has ended, and returns True; False if that cannot be known (e.g. no route).

    `there` completes when the member has sent its name.
    """
    try:
        for _, target in await look_up(handle.address.host):
            try:
                was_there = await _follow(str(target[0]), handle, there)
            except ConnectionResetError:  # the process ended before it sent its name: its port is closed now
                was_there = await _follow(str(target[0]), handle, there)
            if was_there:
                break
    except OSError as error:
        if is_exhausted(error):
            raise
        return False
    return True


async def _follow(host: str, handle: Handle, there: asyncio.Future[None]) -> bool:
    """Waits for the name, then for the end of that process; returns False if another process or none answers."""
    try:
        reader, writer = await asyncio.open_connection(host, handle.presence_port)
    except ConnectionRefusedError:
        return False
    try:
        if await reader.readexactly(len(handle.member)) != handle.member.encode():
            return False
        there.set_result(None)
        with contextlib.suppress(OSError):  # a reset is an end too
            await reader.read()
        return True
    except asyncio.IncompleteReadError:
        return False
    finally:
        writer.close()
