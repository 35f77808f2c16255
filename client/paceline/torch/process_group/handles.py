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

__all__ = ["Handle", "Presence", "Watch"]

_SCHEME = "paceline://"

_PROBE_S = 1.0
"""For a member to say its name. Silence counts against nobody: it may be frozen, or far away."""

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
            address, door = parse_endpoint(parts[0]), parse_endpoint(f"door:{parts[1]}").port
            return cls(address, door, parts[2])
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


class Watch:
    """Looks whether members are there, and notices when one goes; on the loop.

    Args:
        handles: the members'.
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._open: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._task: asyncio.Task[None] | None = None

    async def find_gone(self) -> list[int]:
        """Which have surely gone, by position: nobody listens at their door, or another process does.

        Raises:
            OSError: this process has no descriptor left to ask with.
        """
        answers = await asyncio.gather(*(self._is_gone(rank) for rank in range(len(self._handles))))
        return [rank for rank, gone in enumerate(answers) if gone]

    async def begin(self, on_gone: Callable[[int], None]) -> None:
        """From now on calls a function with the position of a member whose process ends."""
        self._task = asyncio.create_task(self._wait(on_gone))

    async def close(self) -> None:
        """Nobody is interested any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for _, writer in self._open.values():
            writer.close()

    async def _is_gone(self, rank: int) -> bool:
        handle = self._handles[rank]
        try:
            async with self._turn, asyncio.timeout(_PROBE_S):
                targets = await look_up(handle.address.host)
                return all([not await self._is_there(str(target[0]), rank) for _, target in targets])
        except OSError as error:  # TimeoutError is one
            if is_exhausted(error):
                raise
            return False

    async def _is_there(self, host: str, rank: int) -> bool:
        handle = self._handles[rank]
        try:
            reader, writer = await asyncio.open_connection(host, handle.door)
        except ConnectionRefusedError:
            return False
        try:
            said = await reader.readexactly(len(handle.member))
        except asyncio.IncompleteReadError:
            said = b""
        except BaseException:
            writer.close()
            raise
        if said != handle.member.encode():
            writer.close()
            return False
        self._open[rank] = reader, writer
        return True

    async def _wait(self, on_gone: Callable[[int], None]) -> None:
        async def end_of(rank: int, reader: asyncio.StreamReader) -> None:
            with contextlib.suppress(OSError):  # it was reset: an end, too
                await reader.read()
            on_gone(rank)

        await asyncio.gather(*(end_of(rank, reader) for rank, (reader, _) in self._open.items()))
