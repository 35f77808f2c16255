"""Look-ups of host names, each on a thread of its own: nothing waits for a slow resolver but whoever asked it.

A resolver can stall for many seconds, and cannot be interrupted: in a container network a look-up of a name whose
container has just died takes 5 to 10 s. asyncio would run it in the pool that transfers of state use too, so that a few
such names held them up, and would wait for it when the process ends. Here each name has a daemon thread while it is
looked up, and all who ask for it meanwhile share the answer; whoever gives up waiting leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

__all__ = ["Found", "look_up", "look_up_all"]

Found = list[tuple[socket.AddressFamily, tuple[Any, ...]]]
"""Addresses in the order in which they should be tried: family, and what sockets take, with port 0."""

_AT_ONCE = 32
"""So many names of one list are looked up at a time."""

_lock = threading.Lock()
_under_way: dict[str, Future[Found]] = {}


async def look_up(host: str) -> Found:
    """The addresses of a host. An IP literal is its own, and needs no thread.

    Raises:
        OSError: the name does not resolve; `socket.gaierror` says whether it is unknown or the resolver in trouble.
    """
    try:
        return _ask(host, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # a name
    with _lock:
        answer = _under_way.get(host)
        if answer is None:
            answer = _under_way[host] = Future()
            answer.set_running_or_notify_cancel()  # whoever stops waiting must not take it from the others
            threading.Thread(target=_run, args=(host, answer), name="paceline-lookup", daemon=True).start()
    return await asyncio.wrap_future(answer)


async def look_up_all(hosts: Iterable[str]) -> dict[str, set[str]]:
    """The IP addresses of each host; none for a name that does not resolve."""
    turn = asyncio.Semaphore(_AT_ONCE)

    async def addresses(host: str) -> set[str]:
        async with turn:
            try:
                return {str(target[0]) for _, target in await look_up(host)}
            except OSError:
                return set()

    names = sorted(set(hosts))
    return dict(zip(names, await asyncio.gather(*map(addresses, names)), strict=True))


def _run(host: str, answer: Future[Found]) -> None:
    found: Found | BaseException
    try:
        found = _ask(host, 0)
    except BaseException as error:  # noqa: BLE001  whoever waits shall hear of it, whatever it is
        found = error
    with _lock:
        del _under_way[host]
    if isinstance(found, BaseException):
        answer.set_exception(found)
    else:
        answer.set_result(found)


def _ask(host: str, flags: int) -> Found:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    except ValueError as error:  # no name at all: a label is empty or too long, or there is a null character
        raise socket.gaierror(socket.EAI_NONAME, f"{error}") from None
    return [(family, target) for family, _, _, _, target in found]
