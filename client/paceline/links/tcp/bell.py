"""Tells a reader through the loop that its sockets have something: once, until it is armed again.

Armed only when the reader has found nothing, so a stream of bytes does not ring for each packet.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable, Sequence

__all__ = ["Bell", "make_bell"]


class Bell:
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


class _EpollBell(Bell):
    """The same with one descriptor on the loop, and without waking the loop to arm it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fds: Sequence[int], ring: Callable[[], None]) -> None:
        self._epoll = select.epoll()
        super().__init__(loop, (self._epoll.fileno(),), ring)
        self._registered: set[int] = set()
        self._loop.call_soon_threadsafe(self._watch, self._fds)

    def arm(self, fds: Sequence[int]) -> None:
        """See `Bell.arm`."""
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


def make_bell(loop: asyncio.AbstractEventLoop, fds: Sequence[int], ring: Callable[[], None]) -> Bell:
    """The best bell of this system."""
    if hasattr(select, "epoll"):
        with contextlib.suppress(OSError):  # no descriptor is left
            return _EpollBell(loop, fds, ring)
    return Bell(loop, fds, ring)
