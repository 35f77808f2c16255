"""How a reader gets a writer's control segment: over a Unix socket, with the ticket that the door gave the writer.

The name of the socket is abstract and random, so it leaves no file behind. A working connection proves that the two
processes share a kernel, and the kernel says which user is at the other end (unix(7), SO_PEERCRED). Everything here
runs and waits on the loop.
"""

from __future__ import annotations

import array
import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from paceline._links.base import Peer
from paceline._links.fault import Fault
from paceline._links.kind import TICKET_LIFETIME
from paceline._links.shm.control_segment import CONTROL_BYTES, LAYOUT, STAGING_AT
from paceline._links.shm.incoming import ShmIncoming, receive_descriptors
from paceline._links.shm.outgoing import ShmOutgoing
from paceline._links.shm.segment import Segment, SegmentError, attach, check_available
from paceline.errors import LinkUnavailable

MAX_TICKET_BYTES = 64

_FULL = 0.01
"""Seconds between attempts to connect to a host whose queue is full."""

_MAX_REPLY = 200
_ACCEPTED = b"\x01"
_OPENING = struct.Struct("<4sHHQ")
"""Magic, layout, bytes of the ticket, bytes of the segment. The ticket follows. The descriptors of segment, bell and
room come with the message."""

_MAGIC = b"PLSM"
_CREDENTIALS = struct.Struct("iII")
"""struct ucred: pid, uid, gid (unix(7))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmLimits:
    """Limits of a `ShmHost` for connections that belong to no half yet."""

    max_strangers: int = 128
    """Most connections that have not shown a ticket yet; others wait in the kernel's queue."""

    ticket_s: float = TICKET_LIFETIME
    """Seconds for which a ticket is valid, and for which a connection may stay silent."""

    recovery_s: float = 1.0
    """Seconds for which no connection is accepted after descriptors have run out."""


class _Refused(Exception):
    """A connection sent an invalid opening."""


@dataclass(frozen=True, slots=True)
class _Expected:
    on_half: Callable[[ShmIncoming], None]
    fault: Fault
    peer: Peer
    neighbours: int
    expiry: asyncio.TimerHandle


class ShmHost:
    """The socket at which writers of this host hand over their control segments. Made and used on the loop.

    `limits` may be replaced: the new ones apply to connections that come later, but for the kernel's queue.

    Raises LinkUnavailable if this system has no shared memory, or no descriptor is left for the socket.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, limits: ShmLimits = ShmLimits()) -> None:
        check_available()
        self.limits = limits
        self.name = f"paceline-{secrets.token_hex(16)}"
        self._loop = loop
        self._expected: dict[bytes, _Expected] = {}
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise LinkUnavailable(f"no shared memory with peers: {error}") from error
        try:
            self._socket.setblocking(False)
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(limits.max_strangers)
        except OSError as error:
            self._socket.close()
            raise LinkUnavailable(f"no shared memory with peers: {error}") from error
        self._accept_more()

    def expect(
        self,
        ticket: bytes,
        on_half: Callable[[ShmIncoming], None],
        fault: Fault,
        peer: Peer,
        neighbours: int = 1,
    ) -> None:
        """Calls `on_half` once, on the loop, with the half that a writer sets up with this ticket.

        The writer has `limits.ticket_s` seconds. This takes over the half before the writer hears that it is accepted.
        """
        assert 0 < len(ticket) <= MAX_TICKET_BYTES
        self.forget(ticket)
        expiry = self._loop.call_later(self.limits.ticket_s, self.forget, ticket)
        self._expected[ticket] = _Expected(on_half, fault, peer, neighbours, expiry)

    def forget(self, ticket: bytes) -> None:
        """Makes a ticket invalid."""
        expected = self._expected.pop(ticket, None)
        if expected is not None:
            expected.expiry.cancel()

    def close(self) -> None:
        """Accepts no more connections. Existing halves stay open. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for ticket in list(self._expected):
            self.forget(ticket)
        for stranger in list(self._strangers):
            self._drop(stranger)

    def _accept_more(self) -> None:
        self._pause = None
        if not self._closed:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            stranger, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # no descriptors: the socket stays readable, and would keep the loop busy
            self._loop.remove_reader(self._socket)
            self._pause = self._loop.call_later(self.limits.recovery_s, self._accept_more)
            return
        stranger.setblocking(False)
        if _uid(stranger) != os.geteuid():
            stranger.close()
            return
        self._strangers[stranger] = self._loop.call_later(self.limits.ticket_s, self._drop, stranger)
        self._loop.add_reader(stranger, self._open, stranger)
        if len(self._strangers) >= self.limits.max_strangers:
            self._loop.remove_reader(self._socket)

    def _detach(self, stranger: socket.socket) -> None:
        """Stops treating a connection as a stranger."""
        self._strangers.pop(stranger).cancel()
        self._loop.remove_reader(stranger)
        if self._pause is None:
            self._accept_more()

    def _drop(self, stranger: socket.socket) -> None:
        self._detach(stranger)
        stranger.close()

    def _open(self, stranger: socket.socket) -> None:
        """Receives the one message with which a writer begins."""
        try:
            data, descriptors = receive_descriptors(stranger, _OPENING.size + MAX_TICKET_BYTES, 3)
        except BlockingIOError:
            return
        except OSError:  # the stranger hung up
            self._drop(stranger)
            return
        self._detach(stranger)
        try:
            expected, half = self._make(stranger, data, descriptors)
        except _Refused as refusal:
            for fd in descriptors:
                os.close(fd)
            _reply(stranger, str(refusal).encode()[:_MAX_REPLY])
            stranger.close()
            return
        try:
            expected.on_half(half)
        except BaseException:
            half.close()
            raise
        _reply(stranger, _ACCEPTED)

    def _make(self, stranger: socket.socket, data: bytes, descriptors: list[int]) -> tuple[_Expected, ShmIncoming]:
        """Makes the half that a message asks for. The half then owns the socket and the descriptors."""
        if len(data) < _OPENING.size:
            raise _Refused("that is not an opening message")
        magic, layout, length, size = _OPENING.unpack_from(data)
        ticket = data[_OPENING.size :]
        if magic != _MAGIC or length != len(ticket):
            raise _Refused("that is not an opening message")
        if (layout, size) != (LAYOUT, CONTROL_BYTES):
            raise _Refused(f"this side has layout {LAYOUT} of {CONTROL_BYTES} bytes")
        expected = self._expected.get(ticket)
        if expected is None:
            raise _Refused("the ticket is unknown or has expired")
        self.forget(ticket)
        if len(descriptors) != 3:
            raise _Refused(f"{len(descriptors)} descriptors arrived, but 3 are needed")
        memory, bell, room = descriptors
        try:
            control = attach(memory, size)
            if not (_is_eventfd(bell) and _is_eventfd(room)):
                raise _Refused("bell and room must be eventfds")
            os.set_blocking(bell, False)
            os.set_blocking(room, False)
            half = ShmIncoming(
                expected.fault, expected.peer, self._loop, stranger, control, bell, room, expected.neighbours
            )
        except SegmentError as error:
            raise _Refused(f"the control segment is unusable: {error}") from error
        except OSError as error:  # no descriptors or no address space are left, or there is no /proc
            raise _Refused(f"the reading side failed: {error}") from error
        os.close(memory)
        return expected, half


async def connect(
    name: str,
    ticket: bytes,
    fault: Fault,
    peer: Peer,
    loop: asyncio.AbstractEventLoop,
    timeout: float,
    neighbours: int = 1,
) -> ShmOutgoing:
    """Sets up the half that writes to a peer, whose `ShmHost` has this name and expects this ticket.

    Raises LinkUnavailable if the two cannot share memory; the text says why.
    """
    check_available()
    made: list[int] = []
    segment: Segment | None = None
    sock: socket.socket | None = None
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        async with asyncio.timeout(timeout):
            await _reach(sock, name)
        if _uid(sock) != os.geteuid():
            raise LinkUnavailable(f"no shared memory with {peer}: that process belongs to another user")
        segment = Segment(CONTROL_BYTES)
        segment.back(STAGING_AT)
        for _ in range(2):
            made.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        opening = _OPENING.pack(_MAGIC, LAYOUT, len(ticket), CONTROL_BYTES) + ticket
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.fd, *made]))
        sock.sendmsg([opening], [rights])
        async with asyncio.timeout(timeout):
            answer = await loop.sock_recv(sock, _MAX_REPLY)
        if answer != _ACCEPTED:
            raise LinkUnavailable(
                f"{peer} refused to share memory: {answer.decode('utf-8', 'replace') or 'it hung up'}"
            )
        bell, room = made
        return ShmOutgoing(fault, peer, sock, segment, bell, room, neighbours)
    except BaseException as error:
        for fd in made:
            os.close(fd)
        if segment is not None:
            segment.close()
        if sock is not None:
            sock.close()
        if isinstance(error, TimeoutError):
            raise LinkUnavailable(f"no shared memory with {peer}: it did not answer in {timeout} s") from None
        if isinstance(error, OSError):
            raise LinkUnavailable(f"no shared memory with {peer}: {error}") from error
        raise


async def _reach(sock: socket.socket, name: str) -> None:
    """Connects. A Unix socket connects at once or fails, and no event says when a full queue has room (unix(7))."""
    while True:
        try:
            sock.connect(f"\0{name}")
        except BlockingIOError:
            await asyncio.sleep(_FULL)
        else:
            return


def _uid(sock: socket.socket) -> int:
    """Returns the user of the process at the other end, as the kernel recorded it at connect or listen."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def _is_eventfd(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventfd]"


def _reply(stranger: socket.socket, answer: bytes) -> None:
    try:
        stranger.send(answer)
    except OSError:  # it hung up: the link's stream reports that, and no one else waits for the answer
        return
