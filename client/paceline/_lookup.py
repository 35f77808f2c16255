"""Look-ups of host names, each on a thread of its own: nothing waits for a slow resolver but whoever asked it.

A resolver can stall for many seconds, and cannot be interrupted: in a container network a look-up of a name whose
container has just died takes 5 to 10 s. asyncio would run it in the pool that transfers of state use too, so that a few
such names held them up, and would wait for it when the process ends. Here each name has a daemon thread while it is
looked up, and all who ask for it meanwhile share the answer; whoever gives up waiting takes it from nobody.

A question that is lost costs half a second: glibc asks a name server again after 5 s (resolv.conf(5), `timeout`), and
for so long a host whose network is back would know nobody. While somebody waits for an answer, another thread asks anew
each half second; the first answer counts, a name server's trouble too.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

__all__ = ["Found", "look_up", "look_up_all", "look_up_within"]

Found = list[tuple[socket.AddressFamily, tuple[Any, ...]]]
"""Addresses in the order in which they should be tried: family, and what sockets take, with port 0."""

_AT_ONCE = 32
"""So many names of one list are looked up at a time."""

_AGAIN_S = 0.5
"""Between two questions for one name."""

_SILENCE_S = 4.5
"""Who says after so long that the name server is in trouble has not heard from it: glibc waits for 5 s, or for less if
told so; then silence counts as a word, and whoever waits asks again."""

_THREADS = 12
"""So many ask for one name at a time: the first asks its name server again when the last has begun."""


async def look_up(host: str, *, again: bool = True) -> Found:
    """The addresses of a host. An IP literal is its own, and needs no thread.

    Args:
        host: its name, or an IP address.
        again: whether to ask anew while there is no answer.

    Raises:
        OSError: the name does not resolve; `socket.gaierror` says whether it is unknown or the resolver in trouble.
    """
    try:
        return _resolve(host, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # a name
    with _lock:
        question = _under_way.setdefault(host, _Question(host))
        question.ask()
    answer = asyncio.wrap_future(question.answer)
    try:
        while not (await asyncio.wait([answer], timeout=_AGAIN_S if again else None))[0]:
            with _lock:
                question.ask()
        return answer.result()
    finally:
        answer.cancel()


async def look_up_within(host: str, timeout: float) -> Found:
    """As `look_up`, for so many seconds.

    Raises:
        OSError: there is no answer, or none with an address; its text says whose name that is.
    """
    try:
        async with asyncio.timeout(timeout):
            return await look_up(host)
    except TimeoutError:
        raise OSError(f"the name {host!r} does not resolve: the resolver does not answer") from None
    except OSError as error:
        raise OSError(f"the name {host!r} does not resolve: {error.strerror or error}") from None


async def look_up_all(hosts: Iterable[str]) -> dict[str, set[str]]:
    """The IP addresses of each host; none for a name that does not resolve."""
    turn = asyncio.Semaphore(_AT_ONCE)

    async def addresses(host: str) -> set[str]:
        async with turn:
            try:
                return {str(target[0]) for _, target in await look_up(host, again=False)}
            except OSError:
                return set()

    names = sorted(set(hosts))
    return dict(zip(names, await asyncio.gather(*map(addresses, names)), strict=True))


class _Question:
    """For the addresses of a name, from the first who asks until there is an answer.

    Attributes:
        answer: the first; silence is one when no other thread asks any more.
    """

    def __init__(self, host: str) -> None:
        self.answer: Future[Found] = Future()
        self.answer.set_running_or_notify_cancel()  # whoever stops waiting must not take it from the others
        self._host = host
        self._threads = 0
        self._asked_at = float("-inf")

    def ask(self) -> None:
        """Puts the question, if that was not done just now. The caller holds the lock."""
        now = time.monotonic()
        if self.answer.done() or self._threads == _THREADS or now - self._asked_at < _AGAIN_S:
            return
        self._asked_at = now
        self._threads += 1
        try:
            threading.Thread(target=self._run, args=(now,), name="paceline-lookup", daemon=True).start()
        except RuntimeError as error:  # this user or container may have no more of them
            self._threads -= 1
            if not self._threads:
                self._answer_with(OSError(f"no thread is left to ask: {error}"))

    def _run(self, began: float) -> None:
        found: Found | BaseException
        try:
            found = _resolve(self._host, 0)
        except BaseException as error:  # noqa: BLE001  whoever waits shall hear of it, whatever it is
            found = error
        silence = isinstance(found, socket.gaierror) and found.errno == socket.EAI_AGAIN
        silence = silence and time.monotonic() - began > _SILENCE_S
        with _lock:
            self._threads -= 1
            if not (self.answer.done() or (silence and self._threads)):
                self._answer_with(found)

    def _answer_with(self, found: Found | BaseException) -> None:
        del _under_way[self._host]
        if isinstance(found, BaseException):
            self.answer.set_exception(found)
        else:
            self.answer.set_result(found)


_lock = threading.Lock()
_under_way: dict[str, _Question] = {}


def _resolve(host: str, flags: int) -> Found:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    except ValueError as error:  # no name at all: a label is empty or too long, or there is a null character
        raise socket.gaierror(socket.EAI_NONAME, f"{error}") from None
    return [(family, target) for family, _, _, _, target in found]
