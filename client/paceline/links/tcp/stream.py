"""One socket of a half: bytes one way, without blocking, in the clear or over TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import sys
from collections.abc import Sequence
from typing import TypeAlias

from paceline._fork import protect

__all__ = ["Buffer", "SendStream", "Stream", "TlsStream", "make_stream", "tune"]

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
