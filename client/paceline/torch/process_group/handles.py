"""Handles of members that come and go: their content, and how to tell whether the member still lives.

A member answers every connection to its own port with its name. So a process that has ended differs from a slow one:
its port refuses connections, or another process answers. To notice the end of a member, keep the connection open.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline._address import Endpoint, parse_endpoint
from paceline._exhausted import is_exhausted
from paceline._fork import protect
from paceline._lookup import look_up

__all__ = ["Handle", "Presence", "PresenceWatcher"]

_SCHEME = "paceline://"

_PROBE_S = 1.0
"""Seconds to wait for a member's name. A silent member is not taken for dead: it may be frozen or far away."""

_AT_ONCE = 64
"""Members that are asked at a time."""

_BACKLOG = 1024
"""Connections that may wait for an answer at a time."""

_MEMBER_BYTES = 8


class Handle(NamedTuple):
    """A member as others know it: "paceline://host:port/door/member".

    Attributes:
        address: where its coordinator listens.
        door: the port at which it says its name.
        member: its name, which no other process ever has.
    """

    address: Endpoint
    door: int
    member: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.address}/{self.door}/{self.member}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Reads a handle.

        Raises:
            ValueError: it is none of ours.
        """
        parts = text.removeprefix(_SCHEME).split("/")
        if text.startswith(_SCHEME) and len(parts) == 3 and len(parts[2]) == 2 * _MEMBER_BYTES and parts[2].isalnum():
            address, door = parse_endpoint(parts[0]), parts[1]
            if door.isascii() and door.isdigit() and int(door) < 1 << 16:
                return cls(address, int(door), parts[2])
        raise ValueError(f"{text!r:.100} is no handle of this backend: those are {_SCHEME}host:port/door/member")


class Presence:
    """Answers connections to this member's port with its name; on the loop.

    Attributes:
        member: the name.
        door: the port.
    """

    def __init__(self) -> None:
        self.member = secrets.token_hex(_MEMBER_BYTES)
        self.door = 0
        self._server: asyncio.Server | None = None
        self._asking: set[asyncio.BaseTransport] = set()

    async def open(self, host: str) -> None:
        """Starts to answer connections.

        Args:
            host: an IP address of this host; "::" stands for all, by IPv4 too.

        Raises:
            OSError: it cannot listen there.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
        loop = asyncio.get_running_loop()
        answer = functools.partial(_Answer, self.member, self._asking)
        self._server = await loop.create_server(answer, sock=listening, backlog=_BACKLOG)
        self.door = listening.getsockname()[1]
        protect(id(self), listening_port=self.door, dialled=set())

    async def close(self) -> None:
        """Stops answering, and ends all open connections."""
        protect(id(self), listening_port=0, dialled=set())
        if self._server is not None:
            self._server.close()
        for transport in list(self._asking):
            transport.close()


class _Answer(asyncio.Protocol):
    """Sends the name, and keeps the connection open, so that it ends when this process ends."""

    def __init__(self, member: str, asking: set[asyncio.BaseTransport]) -> None:
        self._member, self._asking = member, asking

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._asking.add(transport)
        transport.write(self._member.encode())

    def connection_lost(self, exc: Exception | None) -> None:
        self._asking.discard(self._transport)


class PresenceWatcher:
    """Tests whether members live, and notices when one ends; on the loop.

    Args:
        handles: handles of the members.
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._ends: dict[int, asyncio.Task[bool]] = {}

    async def find_gone(self) -> list[int]:
        """The positions of members that have surely ended: their port refuses connections, or is another process's.

        Raises:
            OSError: this process has no descriptor left to ask with.
        """
        answers = await asyncio.gather(*(self._is_gone(rank) for rank in range(len(self._handles))))
        return [rank for rank, gone in enumerate(answers) if gone]

    async def begin(self, on_gone: Callable[[int], None]) -> None:
        """Starts to call a function with the position of each member whose process ends.

        Members that were silent in `find_gone` are included, whether they answer later or not.
        """

        def tell(rank: int, end: asyncio.Task[bool]) -> None:
            if not end.cancelled() and end.exception() is None and end.result():
                on_gone(rank)

        for rank, end in self._ends.items():
            end.add_done_callback(functools.partial(tell, rank))

    async def close(self) -> None:
        """Stops watching."""
        for end in self._ends.values():
            end.cancel()
        await asyncio.gather(*self._ends.values(), return_exceptions=True)

    async def _is_gone(self, rank: int) -> bool:
        there = asyncio.get_running_loop().create_future()
        async with self._turn:
            end = self._ends[rank] = asyncio.create_task(_end_of(self._handles[rank], there))
            await asyncio.wait([end, there], timeout=_PROBE_S, return_when=asyncio.FIRST_COMPLETED)
        return end.done() and end.result()


async def _end_of(handle: Handle, there: asyncio.Future[None]) -> bool:
    """Waits for the end of a member and returns True; False if it cannot be known, for instance without a route.

    Args:
        handle: handle of the member.
        there: completed when the member has sent its name.
    """
    try:
        for _, target in await look_up(handle.address.host):
            try:
                was_there = await _follow(str(target[0]), handle, there)
            except ConnectionResetError:  # it ended before it had sent its name; its port is closed now
                was_there = await _follow(str(target[0]), handle, there)
            if was_there:
                break
    except OSError as error:
        if is_exhausted(error):
            raise
        return False
    return True


async def _follow(host: str, handle: Handle, there: asyncio.Future[None]) -> bool:
    """Waits for the name, then for the end of that process; False if another process or none answers."""
    try:
        reader, writer = await asyncio.open_connection(host, handle.door)
    except ConnectionRefusedError:
        return False
    try:
        if await reader.readexactly(len(handle.member)) != handle.member.encode():
            return False
        there.set_result(None)
        with contextlib.suppress(OSError):  # it was reset: an end, too
            await reader.read()
        return True
    except asyncio.IncompleteReadError:
        return False
    finally:
        writer.close()
