"""The sockets of a TCP half: they carry bytes in one direction without blocking, in the clear or over TLS.

A reader's thread waits in `wait_ready`, and the loop waits in `retry`. A `SocketBell` tells a reader, through the loop,
that its sockets are readable. The reader arms the bell only when it has found nothing, so the bell does not ring for
each packet of a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

from paceline._base.processes import protect

T = TypeVar("T")

Buffer: TypeAlias = bytes | memoryview

_KEEP_IDLE = 60
"""Seconds after which an idle connection sends a keepalive, because firewalls forget connections that are silent."""

_RECORD = 16 << 10
"""Most bytes that TLS encrypts at a time (RFC 8446, 5.1)."""


_TCP_INFO = struct.Struct("=24xI28xI")
"""Fields of `struct tcp_info` (linux/tcp.h): unacknowledged segments, and milliseconds since the last ACK came."""


class Stream:
    """A connected socket with its handshake done (see `tune`). One thread uses it at a time.

    `turned` is True if the caller must wait for the other direction before it retries a call that moved nothing,
    because TLS has to exchange a message of its own first.
    """

    turned = False

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self._waits_since = 0.0
        # A forked child cuts this socket off, by its own port. Otherwise peers would not notice this process's death.
        protect(id(self), listening_port=sock.getsockname()[1], dialled=set())

    def write(self, buffers: Sequence[Buffer]) -> int:
        """Writes as many bytes of the buffers as fit now. Returns how many."""
        try:
            return self.sock.sendmsg(buffers)
        except BlockingIOError:
            return 0

    def read(self, into: memoryview) -> int:
        """Reads the bytes that are there and fit. Returns how many, 0 at the end, -1 if none are there yet."""
        try:
            return self.sock.recv_into(into)
        except BlockingIOError:
            return -1

    def stuck_for(self, now: float) -> float:
        """See `Outgoing.stuck_for`. Returns 0 if the system does not tell."""
        if sys.platform != "linux":
            return 0.0
        try:
            unacked, age = _TCP_INFO.unpack(self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        except OSError:  # closed
            return 0.0
        if not unacked or now - age / 1000 > self._waits_since:
            self._waits_since = now
        return now - self._waits_since

    def shut(self) -> None:
        """Ends the connection in both directions. The kernel still delivers the bytes that it has."""
        with contextlib.suppress(OSError):  # it is broken already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket."""
        protect(id(self), listening_port=0, dialled=set())
        self.sock.close()


class SendStream(Stream):
    """A stream over a socket without sendmsg (Windows)."""

    def write(self, buffers: Sequence[Buffer]) -> int:
        """See `Stream.write`. Joins short buffers, so that they make one packet and one record."""
        if len(buffers) > 1 and sum(map(len, buffers)) <= _RECORD:
            buffers = (b"".join(buffers),)
        total = 0
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                count = self._send(rest)
                if not count:
                    return total
                total += count
                rest = rest[count:]
        return total

    def _send(self, data: memoryview) -> int:
        try:
            return self.sock.send(data)
        except BlockingIOError:
            return 0


class TlsStream(SendStream):
    """A socket with TLS. OpenSSL keeps a record that it could not send, so a retry has to begin with the same bytes."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)

    def read(self, into: memoryview) -> int:
        """See `Stream.read`."""
        self.turned = False
        total, count = 0, _RECORD
        while count == _RECORD and total < len(into):  # a full record may be followed by more
            try:
                count = self.sock.recv_into(into[total:])
            except ssl.SSLWantReadError:
                return total or -1
            except ssl.SSLWantWriteError:
                self.turned = True
                return total or -1
            except OSError:
                if total:
                    return total  # the next call raises it again
                raise
            total += count
        return total

    def _send(self, data: memoryview) -> int:
        self.turned = False
        try:
            return self.sock.send(data)
        except ssl.SSLWantWriteError:
            return 0
        except ssl.SSLWantReadError:
            self.turned = True
            return 0


def tune(sock: socket.socket) -> None:
    """Sets up a new socket: it does not block, does not hold short frames back, and sends keepalives when idle.

    The kernel adapts the size of the buffers to the network. Setting the size would stop that.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_IDLE)


def make_stream(sock: socket.socket) -> Stream:
    """Makes the stream for a socket."""
    if isinstance(sock, ssl.SSLSocket):
        return TlsStream(sock)
    return Stream(sock) if hasattr(sock, "sendmsg") else SendStream(sock)


class Waker:
    """A descriptor that becomes readable when any thread calls `set`."""

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None
        if hasattr(os, "eventfd"):
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
            self.fd = self._pair[0].fileno()

    def set(self) -> None:
        """Wakes the thread that waits, or will wait, for the descriptor."""
        with contextlib.suppress(BlockingIOError):  # full, and so readable
            if self._pair is None:
                os.eventfd_write(self.fd, 1)
            else:
                self._pair[1].send(b"\0")

    def clear(self) -> None:
        """Makes the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):  # no thread has called `set`
            if self._pair is None:
                os.eventfd_read(self.fd)
            else:
                while self._pair[0].recv(64):
                    pass

    def close(self) -> None:
        """Closes the descriptor. No thread may wait for it, or call a method of this object, any more."""
        if self._pair is None:
            os.close(self.fd)
        else:
            for end in self._pair:
                end.close()


def wait_ready(reading: Iterable[int], writing: Iterable[int], seconds: float) -> None:
    """Waits until one of the descriptors can be read or written, or is broken; at most for `seconds`."""
    if not hasattr(select, "poll"):  # Windows
        select.select(list(reading), list(writing), [*reading, *writing], seconds)
        return
    poll = select.poll()
    for fd in reading:
        poll.register(fd, select.POLLIN)
    for fd in writing:
        poll.register(fd, select.POLLOUT)
    poll.poll(seconds * 1000)


async def retry(loop: asyncio.AbstractEventLoop, sock: socket.socket, call: Callable[[], T]) -> T:
    """Calls a function of a non-blocking socket until it need not wait, and returns its result."""
    while True:
        try:
            return call()
        except (BlockingIOError, ssl.SSLWantReadError):
            await _ready(sock.fileno(), loop.add_reader, loop.remove_reader)
        except ssl.SSLWantWriteError:
            await _ready(sock.fileno(), loop.add_writer, loop.remove_writer)


async def _ready(fd: int, add: Callable[..., object], remove: Callable[[int], object]) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(fd, _tell, ready)
    try:
        await ready
    finally:
        remove(fd)


def _tell(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class SocketBell:
    """Rings when an armed socket can be read. Works on every loop that can watch sockets.

    The loop calls `ring`, which must not block. The sockets are not armed at first.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fds: Sequence[int], ring: Callable[[], None]) -> None:
        self._loop = loop
        self._fds = tuple(fds)
        self._ring = ring
        self._closed = False

    def arm(self, fds: Sequence[int]) -> None:
        """Rings once for each of these sockets when it can be read, at once if it already can. From any thread."""
        self._loop.call_soon_threadsafe(self._watch, tuple(fds))

    def close(self, then: Callable[[], None]) -> None:
        """Stops ringing. Calls `then`, which may close the sockets, at once or on the loop. From any thread."""
        self._closed = True
        try:
            self._loop.call_soon_threadsafe(self._leave, then)
        except RuntimeError:  # the loop is closed, and has forgotten them
            self._leave(then)

    def _watch(self, fds: Sequence[int]) -> None:
        for fd in () if self._closed else fds:
            self._loop.add_reader(fd, self._rung, fd)

    def _rung(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._ring()

    def _leave(self, then: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            for fd in self._fds:
                self._loop.remove_reader(fd)
        then()


class _EpollBell(SocketBell):
    """A `SocketBell` with only one descriptor on the loop, which arms without waking the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fds: Sequence[int], ring: Callable[[], None]) -> None:
        self._epoll = select.epoll()
        super().__init__(loop, (self._epoll.fileno(),), ring)
        self._registered: set[int] = set()
        self._loop.call_soon_threadsafe(self._watch, self._fds)

    def arm(self, fds: Sequence[int]) -> None:
        """See `SocketBell.arm`."""
        for fd in fds:
            if fd in self._registered:
                self._epoll.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)
            else:  # only now: an unarmed socket that hangs up would ring all the time
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
                self._registered.add(fd)

    def _rung(self, fd: int) -> None:
        if self._epoll.poll(0):
            self._ring()

    def _leave(self, then: Callable[[], None]) -> None:
        super()._leave(then)
        self._epoll.close()


def make_bell(loop: asyncio.AbstractEventLoop, fds: Sequence[int], ring: Callable[[], None]) -> SocketBell:
    """Makes the best bell that this system supports."""
    if hasattr(select, "epoll"):
        with contextlib.suppress(OSError):  # no descriptor is left
            return _EpollBell(loop, fds, ring)
    return SocketBell(loop, fds, ring)
