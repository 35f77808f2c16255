"""Looks up host names, each on a thread of its own, so that a slow resolver delays only the callers that asked it.

A resolver can stall for many seconds, and cannot be interrupted: in a container network a look-up of a name whose
container has just died takes 5 to 10 s. asyncio would run it in the pool that transfers of state use too, so a few such
names would hold them up, and asyncio would wait for it when the process ends. Here each name has a daemon thread while
it is looked up. All callers that ask for the name meanwhile share the answer, and one that stops waiting does not
cancel it for the others.

A lost query costs half a second. glibc asks a name server again only after 5 s (resolv.conf(5), `timeout`); until then
a host whose network is back could resolve no name. So while a caller waits, another thread asks again each half second.
The first answer counts, even if it says that the name server is in trouble.
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
"""Addresses in the order in which to try them: family, and the address as sockets take it, with port 0."""

_AT_ONCE = 32
"""Most names of one list that are looked up at a time."""

_AGAIN_S = 0.5
"""Seconds between two queries for one name."""

_SILENCE_S = 4.5
"""A query that reports trouble of the name server after more seconds than this got no answer: glibc waits for 5 s. If
it is configured to wait for less, silence counts as an answer, and the callers ask again."""

_THREADS = 12
"""Most threads that query one name at a time: when the last starts, glibc repeats the query of the first."""


async def look_up(host: str, *, again: bool = True) -> Found:
    """Returns the addresses of a host. An IP literal is its own address, and needs no thread.

    Args:
        host: the host's name, or an IP address.
        again: whether to ask again while there is no answer.

    Raises:
        OSError: the name does not resolve; `socket.gaierror` says if it is unknown or the resolver is in trouble.
    """
    try:
        return _resolve(host, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # it is a name
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
    """Calls `look_up`, for at most `timeout` seconds.

    Raises:
        OSError: there is no answer, or none with an address; the text contains the name.
    """
    try:
        async with asyncio.timeout(timeout):
            return await look_up(host)
    except TimeoutError:
        raise OSError(f"the name {host!r} does not resolve: the resolver does not answer") from None
    except OSError as error:
        raise OSError(f"the name {host!r} does not resolve: {error.strerror or error}") from None


async def look_up_all(hosts: Iterable[str]) -> dict[str, set[str]]:
    """Returns the IP addresses of each host; an empty set for a name that does not resolve."""
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
    """The look-up of one name, from the first caller that asks until there is an answer.

    Attributes:
        answer: the first answer; silence counts as one when no other thread is asking.
    """

    def __init__(self, host: str) -> None:
        self.answer: Future[Found] = Future()
        self.answer.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it for the others
        self._host = host
        self._threads = 0
        self._asked_at = float("-inf")

    def ask(self) -> None:
        """Asks on another thread, unless one asked just now. The caller holds the lock."""
        now = time.monotonic()
        if self.answer.done() or self._threads == _THREADS or now - self._asked_at < _AGAIN_S:
            return
        self._asked_at = now
        self._threads += 1
        try:
            threading.Thread(target=self._run, args=(now,), name="paceline-lookup", daemon=True).start()
        except RuntimeError as error:  # this user or container has reached its limit of threads
            self._threads -= 1
            if not self._threads:
                self._answer_with(OSError(f"cannot start a thread that asks the resolver: {error}"))

    def _run(self, began: float) -> None:
        found: Found | BaseException
        try:
            found = _resolve(self._host, 0)
        except BaseException as error:  # noqa: BLE001  all waiting callers get the error, whatever it is
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
    except ValueError as error:  # not a name: a label is empty or too long, or there is a null character
        raise socket.gaierror(socket.EAI_NONAME, f"{error}") from None
    return [(family, target) for family, _, _, _, target in found]
