"""Waiting for sockets: in a thread, until one is ready or somebody calls; and on the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["Waker", "retry", "wait_ready"]

T = TypeVar("T")


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
        """Wakes whoever waits, or will wait, for the descriptor."""
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
        """Gives the descriptor back; nobody may wait for it, or call, any more."""
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
