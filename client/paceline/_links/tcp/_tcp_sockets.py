"""Sockets of a tcp half: bytes one way without blocking, in the clear or over TLS; and waiting for them.

A reader's thread waits in `wait_ready`, the loop in `retry`, and a `SocketBell` tells a reader through the loop that
its sockets have something. The bell is armed only when the reader has found nothing, so a stream of bytes does not ring
for each packet.
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

from paceline._fork import protect

__all__ = [
    "Buffer",
    "SendStream",
    "SocketBell",
    "Stream",
    "TlsStream",
    "Waker",
    "make_bell",
    "make_stream",
    "retry",
    "tune",
    "wait_ready",
]

T = TypeVar("T")

Buffer: TypeAlias = bytes | memoryview

_KEEP_IDLE = 60
"""Seconds after which an idle connection says that it is there: firewalls forget those that do not."""

_RECORD = 16 << 10
"""Bytes that TLS encrypts at a time (RFC 8446, 5.1)."""


_TCP_INFO = struct.Struct("=24xI28xI")
"""Of `struct tcp_info` (linux/tcp.h): segments that are not acknowledged, and milliseconds since the last that was."""


class Stream:
    """A connected socket. One thread uses it at a time.

    Args:
        sock: connected, with its handshake done; see `tune`.

    Attributes:
        fd: its descriptor.
        turned: before the call that moved nothing is tried again, wait for the other direction: TLS has to say
            something of its own first.
    """

    turned = False

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self._waits_since = 0.0
        # In a forked child this socket is cut off, by its own port: peers would not hear of this process's death.
        protect(id(self), listening_port=sock.getsockname()[1], dialled=set())

    def write(self, buffers: Sequence[Buffer]) -> int:
        """Hands over as many bytes of the buffers as fit now; returns how many.

        Raises:
            OSError: the connection is broken.
        """
        try:
            return self.sock.sendmsg(buffers)
        except BlockingIOError:
            return 0

    def read(self, into: memoryview) -> int:
        """Takes in as many bytes as there are and fit; how many, 0 at the end, -1 if none are there yet.

        Raises:
            OSError: the connection is broken.
        """
        try:
            return self.sock.recv_into(into)
        except BlockingIOError:
            return -1

    def stuck_for(self, now: float) -> float:
        """See `Outgoing.stuck_for`; 0 where the system does not tell."""
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
        """Ends the connection in both directions; what the kernel has is still delivered."""
        with contextlib.suppress(OSError):  # it is broken already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the descriptor back."""
        protect(id(self), listening_port=0, dialled=set())
        self.sock.close()


class SendStream(Stream):
    """For sockets without sendmsg (Windows)."""

    def write(self, buffers: Sequence[Buffer]) -> int:
        """See `Stream.write`: short buffers are joined, so that they make one packet, and one record."""
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
    """A socket with TLS. OpenSSL keeps the record that it could not send: a retry has to begin with the same bytes."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)

    def read(self, into: memoryview) -> int:
        """See `Stream.read`."""
        self.turned = False
        total, count = 0, _RECORD
        while count == _RECORD and total < len(into):  # that much comes at a time; after less there may be no more
            try:
                count = self.sock.recv_into(into[total:])
            except ssl.SSLWantReadError:
                return total or -1
            except ssl.SSLWantWriteError:
                self.turned = True
                return total or -1
            except OSError:
                if total:
                    return total  # the next call will meet it again
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
    """Sets up a new socket: it does not block, does not hold short frames back, and is not forgotten when idle.

    The size of its buffers is left to the kernel, which fits it to the line; to set it would end that.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_IDLE)


def make_stream(sock: socket.socket) -> Stream:
    """The stream for a socket."""
    if isinstance(sock, ssl.SSLSocket):
        return TlsStream(sock)
    return Stream(sock) if hasattr(sock, "sendmsg") else SendStream(sock)


class Waker:
    """A descriptor that becomes readable when somebody calls `set`; from any thread."""

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
        with contextlib.suppress(BlockingIOError):  # full: it is readable then
            if self._pair is None:
                os.eventfd_write(self.fd, 1)
            else:
                self._pair[1].send(b"\0")

    def clear(self) -> None:
        """Makes it unreadable again."""
        with contextlib.suppress(BlockingIOError):  # nobody called
            if self._pair is None:
                os.eventfd_read(self.fd)
            else:
                while self._pair[0].recv(64):
                    pass

    def close(self) -> None:
        """Gives the descriptor back. No thread may wait for it, or call anything here, any more."""
        if self._pair is None:
            os.close(self.fd)
        else:
            for end in self._pair:
                end.close()


def wait_ready(reading: Iterable[int], writing: Iterable[int], seconds: float) -> None:
    """Waits until one of the descriptors can be read, or written, or is broken; for so many seconds at most."""
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
    """What a call on a socket that does not block returns, once it does not want to wait any more."""
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
    """Rings when a socket that is armed can be read; for loops that watch sockets, on any system.

    Args:
        loop: where `ring` is called.
        fds: the sockets, not armed.
        ring: must not block.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fds: Sequence[int], ring: Callable[[], None]) -> None:
        self._loop = loop
        self._fds = tuple(fds)
        self._ring = ring
        self._closed = False

    def arm(self, fds: Sequence[int]) -> None:
        """Rings once for each of these, when it can be read or can be read already. From any thread."""
        self._loop.call_soon_threadsafe(self._watch, tuple(fds))

    def close(self, then: Callable[[], None]) -> None:
        """Rings no more; calls `then`, which may close the sockets, at once or on the loop. From any thread."""
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
    """The same with one descriptor on the loop, and without waking the loop to arm it."""

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
            else:  # not before it is armed: a socket that hangs up would ring all the time
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
                self._registered.add(fd)

    def _rung(self, fd: int) -> None:
        if self._epoll.poll(0):
            self._ring()

    def _leave(self, then: Callable[[], None]) -> None:
        super()._leave(then)
        self._epoll.close()


def make_bell(loop: asyncio.AbstractEventLoop, fds: Sequence[int], ring: Callable[[], None]) -> SocketBell:
    """The best bell of this system."""
    if hasattr(select, "epoll"):
        with contextlib.suppress(OSError):  # no descriptor is left
            return _EpollBell(loop, fds, ring)
    return SocketBell(loop, fds, ring)
