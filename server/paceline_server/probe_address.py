"""Checks at a member's address whether a process still listens there, and whether it runs.

The coordinator's own addresses are no member's: what answers there is the coordinator, whoever gives such an address
for its door. So they count as ones at which nobody listens.

A host refuses connections to a process that has ended. One that dies closes one socket after the other: on a busy
machine it may listen for a while after its stream has ended, so this check is repeated. For a process that is stopped
the kernel accepts connections, so only bytes from the process itself show that it runs. gRPC sends them from threads of
its own, which need no Python interpreter: a door answers although a call into C keeps the interpreter busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping

from paceline_protocol.coordinator import Session
from paceline_server.blocking_calls import start_apart

_TIMEOUT_S = 1.0
"""Seconds for the look-up of a name, and for an answer. The host of a dead process refuses within microseconds; a
host's silence proves nothing."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_S = 0.02, 0.16, 60.0
"""Seconds between the first two checks of a member, between two of them at most, and between the first and the last."""

_MOST_WATCHED = 256
"""Most checks at a time whether somebody listens. If a network is cut, thousands of members may vanish, and each check
may take twice `_TIMEOUT_S`."""

_MOST_ASKED = 1024
"""Doors that are asked at a time; the others wait, because each takes a descriptor for each of its addresses."""

_MOST_ADDRESSES = 8
"""The most addresses of a name that are tried, at the same time. The others prove nothing."""

_MOST_LOOK_UPS = 16
"""The most names that are looked up at a time: each takes a thread, which a resolver in trouble holds for seconds."""

_look_ups = threading.BoundedSemaphore(_MOST_LOOK_UPS)


Own = Collection[tuple[str, int]]
"""IP addresses and ports at which the coordinator itself listens."""


async def is_refused(address: str, own: Own = (), *, timeout_s: float = _TIMEOUT_S) -> bool:
    """Returns True if the host answers that no process listens on the port.

    Returns False if the name cannot be resolved, or if one of the host's addresses cannot be reached or answers late:
    the network may be at fault, and the process may listen there.
    """
    refused = [said async for said in _try_each(address, functools.partial(_refuses, own), timeout_s)]
    return bool(refused) and all(refused)


async def answers(address: str, greeting: bytes, own: Own = (), *, timeout_s: float = _TIMEOUT_S) -> bool:
    """Returns True as soon as something has come from one of the host's addresses: the process that listens there runs.

    Returns False if nothing came in time; that proves nothing.
    """
    check = functools.partial(_answers, greeting, own)
    async with contextlib.aclosing(_try_each(address, check, timeout_s)) as answered:
        async for said in answered:
            if said:
                return True
    return False


def greeting(tls: bool) -> bytes:
    """Returns what to send to a gRPC server that it may answer: nothing, or the first message of a TLS handshake.

    A server without TLS sends its settings without being asked (RFC 9113, 3.4).
    """
    if not tls:
        return b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    sent = ssl.MemoryBIO()
    handshake = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="paceline")
    with contextlib.suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    return sent.read()


def pauses(patience: float) -> Iterator[float]:
    """Yields the seconds to wait before each check: none before the first one, then pauses that double to a limit.

    Ends when `patience` is over: later checks are of no use.
    """
    yield 0.0
    pause = waited = _FIRST_PAUSE_S
    while waited <= min(patience, _LONGEST_S):
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        waited += pause


class AddressProbes:
    """The checks that are in progress on the running loop."""

    def __init__(self, *, tls: bool = False) -> None:
        self.own: set[tuple[str, int]] = set()
        self._greeting = greeting(tls)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._watching = asyncio.Semaphore(_MOST_WATCHED)
        self._questions: set[asyncio.Task[None]] = set()
        self._asking = asyncio.Semaphore(_MOST_ASKED)

    def watch(self, session: Session, sessions: Mapping[str, Session], refused: Callable[[], None]) -> None:
        """Checks again and again whether a process listens at a member's address; calls `refused` once none does.

        The checks end when the member is back or its session has ended, and after its `failure_timeout` at the latest.
        """
        if (earlier := self._watches.get(session.member_id)) is not None:
            earlier.cancel()
        task = asyncio.ensure_future(self._watch(session, sessions, refused))
        self._watches[session.member_id] = task
        task.add_done_callback(functools.partial(self._ended, session.member_id))

    def ask(self, address: str, answered: Callable[[], None]) -> None:
        """Calls `answered` if the process that listens at the address runs."""
        task = asyncio.ensure_future(self._ask(address, answered))
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    def close(self) -> None:
        """Ends all checks."""
        for task in (*self._watches.values(), *self._questions):
            task.cancel()

    async def _watch(self, session: Session, sessions: Mapping[str, Session], refused: Callable[[], None]) -> None:
        for pause in pauses(session.settings.failure_timeout):
            await asyncio.sleep(pause)
            async with self._watching:
                if sessions.get(session.member_id) is not session or session.stream is not None:
                    return
                gone = await is_refused(session.address, self.own)
            if gone:
                refused()
                return

    def _ended(self, member_id: str, task: asyncio.Task[None]) -> None:
        if self._watches.get(member_id) is task:
            del self._watches[member_id]

    async def _ask(self, address: str, answered: Callable[[], None]) -> None:
        async with self._asking:
            answer = await answers(address, self._greeting, self.own)
        if answer:
            answered()


async def _try_each(
    address: str, check: Callable[[str, int], Awaitable[bool]], timeout_s: float
) -> AsyncGenerator[bool | None]:
    """Yields what a check of each of a host's addresses says, as they end; None for one that proves nothing."""
    host, _, digits = address.rpartition(":")
    if not digits.isdecimal():
        return
    try:
        port = int(digits)
        async with asyncio.timeout(timeout_s):
            found = await _addresses(host.strip("[]"))
    except (OSError, ValueError):  # TimeoutError is an OSError
        return
    checks = [asyncio.ensure_future(_try(check, ip, port, timeout_s)) for ip in sorted(found)[:_MOST_ADDRESSES]]
    try:
        for ended in asyncio.as_completed(checks):
            yield await ended
        if len(found) > len(checks):
            yield None
    finally:
        for each in checks:
            each.cancel()


async def _try(check: Callable[[str, int], Awaitable[bool]], ip: str, port: int, timeout_s: float) -> bool | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await check(ip, port)
    except (OSError, ValueError, OverflowError):  # no way leads there, or nothing came in time
        return None


def _is_own(own: Own, ip: str, port: int) -> bool:
    """True if the coordinator itself listens there, at this address or at all addresses of its host."""
    address = _plain(ip)
    at_port = [_plain(mine) for mine, used in own if used == port]
    if address in at_port or (at_port and address.is_unspecified):
        return True
    return any(mine.is_unspecified for mine in at_port) and _is_here(str(address))


def _plain(ip: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Reads an address, also one of IPv4 that is written as one of IPv6."""
    address = ipaddress.ip_address(ip)
    return getattr(address, "ipv4_mapped", None) or address


def _is_here(ip: str) -> bool:
    """True if the address is one of this host's: only these can be bound."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True


async def _refuses(own: Own, ip: str, port: int) -> bool:
    if _is_own(own, ip, port):
        return True
    try:
        _, writer = await asyncio.open_connection(ip, port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def _answers(greeting: bytes, own: Own, ip: str, port: int) -> bool:
    if _is_own(own, ip, port):
        return False
    reader, writer = await asyncio.open_connection(ip, port)
    try:
        writer.write(greeting)
        return bool(await reader.read(1))
    finally:
        writer.close()


async def _addresses(host: str) -> set[str]:
    """Returns the addresses of a host; raises OSError or ValueError if there are none."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return {host}
    if not _look_ups.acquire(blocking=False):
        raise OSError("too many names are being looked up")
    try:
        answer = start_apart(functools.partial(_look_up, host), "paceline-lookup")
    except RuntimeError as error:  # there are too many threads
        _look_ups.release()
        raise OSError(str(error)) from None
    return await asyncio.wrap_future(answer)


def _look_up(host: str) -> set[str]:
    try:
        return {str(target[0]) for *_, target in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    finally:
        _look_ups.release()
