"""Handles of members that come and go: what is in one, and whether the member that it names is still there.

A member answers every connection to a port of its own with its name. So a handle whose process has ended is told from
one that is slow: nobody listens there any more, or somebody else does. Whoever wants to know of its end keeps the
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline._exhausted import is_exhausted
from paceline._fork import protect
from paceline.session.address import Endpoint, parse_endpoint
from paceline.session.lookup import look_up

__all__ = ["Handle", "Presence", "PresenceWatcher"]

_SCHEME = "paceline://"

_PROBE_S = 1.0
"""To wait for a member's name. Silence counts against nobody: it may be frozen, or far away."""

_AT_ONCE = 64
"""Members that are asked at a time."""

_BACKLOG = 1024
"""So many may ask at one time."""

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
    """This member's name, for all who ask; on the loop.

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
        """Answers from now on.

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
        """Answers no more, and ends the connections of those who still watch."""
        protect(id(self), listening_port=0, dialled=set())
        if self._server is not None:
            self._server.close()
        for transport in list(self._asking):
            transport.close()


class _Answer(asyncio.Protocol):
    """Says the name, and stays until the other side goes: the end of this connection is the end of this process."""

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
    """Looks whether members are there, and notices when one goes; on the loop.

    Args:
        handles: the members'.
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._ends: dict[int, asyncio.Task[bool]] = {}

    async def find_gone(self) -> list[int]:
        """Which have surely gone, by position: nobody listens at their door, or another process does.

        Raises:
            OSError: this process has no descriptor left to ask with.
        """
        answers = await asyncio.gather(*(self._is_gone(rank) for rank in range(len(self._handles))))
        return [rank for rank, gone in enumerate(answers) if gone]

    async def begin(self, on_gone: Callable[[int], None]) -> None:
        """From now on calls a function with the position of a member whose process ends.

        One that was silent in `find_gone` is still being asked: what it says then, or its end, counts as well.
        """

        def tell(rank: int, end: asyncio.Task[bool]) -> None:
            if not end.cancelled() and end.exception() is None and end.result():
                on_gone(rank)

        for rank, end in self._ends.items():
            end.add_done_callback(functools.partial(tell, rank))

    async def close(self) -> None:
        """Nobody is interested any more."""
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
    """True when the member has gone, at once or later; False if that cannot be known, as where no way leads there.

    Args:
        handle: the member's.
        there: is told when it has said its name.
    """
    try:
        for _, target in await look_up(handle.address.host):
            try:
                was_there = await _follow(str(target[0]), handle, there)
            except ConnectionResetError:  # it ended before it had said its name: nobody listens there any more
                was_there = await _follow(str(target[0]), handle, there)
            if was_there:
                break
    except OSError as error:
        if is_exhausted(error):
            raise
        return False
    return True


async def _follow(host: str, handle: Handle, there: asyncio.Future[None]) -> bool:
    """Asks for the name, and returns when that process has ended; False if it is another's, or there is none."""
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
