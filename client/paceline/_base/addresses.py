"""Addresses: reading "host:port", looking up names, and finding the address at which peers reach this worker.

**Looking up.** Each name is looked up on a thread of its own, so a slow resolver delays only the callers that asked it.
A resolver can stall for many seconds, and cannot be interrupted: in a container network a look-up of a name whose
container has just died takes 5 to 10 s. asyncio would run it in the pool that transfers of state use too, so a few such
names would hold them up, and asyncio would wait for it when the process ends. All callers that ask for one name
meanwhile share the answer, and one that stops waiting does not cancel it for the others.

A lost query costs half a second. glibc asks a name server again only after 5 s (resolv.conf(5), `timeout`); until then
a host whose network is back could resolve no name. So while a caller waits, another thread asks again each half second.
The first answer counts, even if it says that the name server is in trouble.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.errors import CoordinatorUnreachable, LinkUnavailable, PacelineError

_NUMBERS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


def is_exhausted(error: BaseException) -> bool:
    """Returns True if this process has run out of memory, threads or descriptors, so that no peer is to blame."""
    if isinstance(error, RuntimeError):  # Python's error if it cannot start a thread
        return "can't start new thread" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NUMBERS)


Found = list[tuple[socket.AddressFamily, tuple[Any, ...]]]
"""Addresses in the order in which to try them: family, and the address as sockets take it, with port 0."""

_AT_ONCE = 32
"""Most names of one list that are looked up at a time."""

_THREADS = 12
"""Most threads that query one name at a time: when the last starts, glibc repeats the query of the first."""


class Lookups:
    """The look-ups of this process that are under way, by name.

    `again_s` are the seconds between two queries for one name. A query that reports trouble of the name server after
    more than `silence_s` seconds got no answer: glibc waits for 5 s. If it is configured to wait for less, silence
    counts as an answer, and the callers ask again.
    """

    def __init__(self, *, again_s: float = 0.5, silence_s: float = 4.5) -> None:
        self.again_s = again_s
        self.silence_s = silence_s
        self.lock = threading.Lock()
        self.under_way: dict[str, _Question] = {}


_OURS = Lookups()


async def look_up(host: str, *, again: bool = True, lookups: Lookups = _OURS) -> Found:
    """Returns the addresses of a host, asking `again` while there is no answer. An IP literal needs no thread.

    Raises:
        OSError: the name does not resolve; `socket.gaierror` says if it is unknown or the resolver is in trouble.
    """
    try:
        return _resolve(host, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # it is a name
    with lookups.lock:
        question = lookups.under_way.setdefault(host, _Question(host, lookups))
        question.ask()
    answer = asyncio.wrap_future(question.answer)
    try:
        while not (await asyncio.wait([answer], timeout=lookups.again_s if again else None))[0]:
            with lookups.lock:
                question.ask()
        return answer.result()
    finally:
        answer.cancel()


async def look_up_within(host: str, timeout: float, *, lookups: Lookups = _OURS) -> Found:
    """Calls `look_up`, for at most `timeout` seconds. Without an address it raises OSError, which has the name."""
    try:
        async with asyncio.timeout(timeout):
            return await look_up(host, lookups=lookups)
    except TimeoutError:
        raise OSError(f"the name {host!r} does not resolve: the resolver does not answer") from None
    except OSError as error:
        raise OSError(f"the name {host!r} does not resolve: {error.strerror or error}") from None


async def look_up_all(hosts: Iterable[str], *, lookups: Lookups = _OURS) -> dict[str, set[str]]:
    """Returns the IP addresses of each host; an empty set for a name that does not resolve."""
    turn = asyncio.Semaphore(_AT_ONCE)

    async def addresses(host: str) -> set[str]:
        async with turn:
            try:
                return {str(target[0]) for _, target in await look_up(host, again=False, lookups=lookups)}
            except OSError:
                return set()

    names = sorted(set(hosts))
    return dict(zip(names, await asyncio.gather(*map(addresses, names)), strict=True))


class _Question:
    """The look-up of one name, from the first caller that asks until there is an answer.

    Silence counts as an answer when no other thread is asking.
    """

    def __init__(self, host: str, lookups: Lookups) -> None:
        self.answer: Future[Found] = Future()
        self.answer.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it for the others
        self._host = host
        self._lookups = lookups
        self._threads = 0
        self._asked_at = float("-inf")

    def ask(self) -> None:
        """Asks on another thread, unless one asked just now. The caller holds the lock."""
        now = time.monotonic()
        if self.answer.done() or self._threads == _THREADS or now - self._asked_at < self._lookups.again_s:
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
        silence = silence and time.monotonic() - began > self._lookups.silence_s
        with self._lookups.lock:
            self._threads -= 1
            if not (self.answer.done() or (silence and self._threads)):
                self._answer_with(found)

    def _answer_with(self, found: Found | BaseException) -> None:
        del self._lookups.under_way[self._host]
        if isinstance(found, BaseException):
            self.answer.set_exception(found)
        else:
            self.answer.set_result(found)


def _resolve(host: str, flags: int) -> Found:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    except ValueError as error:  # not a name: a label is empty or too long, or there is a null character
        raise socket.gaierror(socket.EAI_NONAME, f"{error}") from None
    return [(family, target) for family, _, _, _, target in found]


DEFAULT_PORT = 7400
"""Default port of a coordinator."""

_SLOW_S, _RETRY_S, _KNOCK_S = 0.7, 0.5, 1.0
"""Seconds: until a look-up is reported as slow, between two tries, and for an address to answer."""

_IPV6_ADDR_PREFERENCES, _IPV6_PREFER_SRC_PUBLIC = 72, 2


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name or IP literal, without brackets) and a port; port 0 asks for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def ip(self) -> str | None:
        """The host as an IP address in canonical form; None if it is a name."""
        try:
            return str(ipaddress.ip_address(self.host))
        except ValueError:
            return None

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the endpoint."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_endpoint(text: str, *, default_port: int | None = None) -> Endpoint:
    """Parses "host:port", "[::1]:port", or "host" if a default port is given; a ValueError says what is wrong."""
    host, colon, port = text.rpartition(":")
    if (not colon or "]" in port) and default_port is not None:
        host, port = text, str(default_port)
    if not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is not an address of the form host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, [address]:port")
    if not host or "[" in host or "]" in host:
        raise ValueError(f"{text!r} is not an address of the form host:port: its brackets hold no host")
    if not _is_name(host):
        raise ValueError(f"{text!r} is not an address of the form host:port: {host!r:.80} is not a valid host name")
    return Endpoint(host, int(port))


_STAYS = 4
"""Tries at a standby before one at an address that has just not answered. It names that one as leader, or nobody."""


class CoordinatorAddresses:
    """The addresses of a job's coordinators, of which one leads; most jobs have only one.

    `current` is the one that is tried now, or that answered last.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._all = tuple(endpoints)
        self.current = self._all[0]
        self._doubtful: Endpoint | None = None
        self._stays = 0

    @classmethod
    def parse(cls, text: str, *, default_port: int | None = None) -> CoordinatorAddresses:
        """Parses addresses as `parse_endpoint` takes them, with commas between them."""
        return cls([parse_endpoint(each.strip(), default_port=default_port) for each in text.split(",")])

    @property
    def several(self) -> bool:
        """True if there is more than one."""
        return len(self) > 1

    def __len__(self) -> int:
        return len(self._all)

    def turn(self, leader: str | None = None) -> None:
        """Chooses the address to try next.

        `leader` is None if nobody answered at the current address, or the answer made no sense. Otherwise a standby has
        answered, and this is the leader's address as it knows it; empty if it knows none. The address counts only if it
        is one of ours, because the caller shows its token there.
        """
        following = self._all[(self._all.index(self.current) + 1) % len(self._all)]
        named = next((each for each in self._all if str(each) == leader), None)
        chosen = following if named in (None, self.current) else named
        if leader is None:
            self._doubtful, self._stays = self.current, 0
        elif chosen == self._doubtful and self._stays < _STAYS:
            self._stays += 1  # nobody answered there a moment ago; the standby will lead, or hear who does
            return
        self.current = chosen

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._all)

    def __str__(self) -> str:
        return ",".join(map(str, self._all))


def _is_name(host: str) -> bool:
    """Returns True if a resolver accepts the name: no label is empty or too long, and no character ends a name."""
    try:
        return host.isprintable() and not set(host) & set(" /@") and bool(host.encode("idna"))
    except UnicodeError:
        return False


async def reachable_endpoint(
    coordinator: Endpoint,
    advertise: str | None,
    timeout: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
    *,
    slow_s: float = _SLOW_S,
    retry_s: float = _RETRY_S,
) -> Endpoint:
    """Returns the endpoint at which peers can reach this worker.

    This is `advertise` if given, else the address of the interface that leads to the coordinator: a peer that reaches
    the coordinator reaches that network. With a coordinator on loopback the worker stays on loopback. If the
    coordinator has several addresses, reached through different interfaces, the one at which it answers counts.

    The coordinator's name may appear later than this worker (a container that starts beside it), and so may the
    advertised name: both are looked up repeatedly for `timeout` seconds, once if it is 0, with `retry_s` seconds
    between two tries. `say` gets a sentence about the problem when it is found, or when a look-up has taken `slow_s`
    seconds, and again when the problem changes.

    Raises:
        ValueError: `advertise` is malformed, or the address that leads to the coordinator is link-local.
        CoordinatorUnreachable: the coordinator's host name does not resolve, no route leads to it, or it has several
            addresses and answers at none.
        LinkUnavailable: the advertised name does not resolve.
    """
    patience = _Patience(timeout, say, slow_s, retry_s)
    own = parse_endpoint(advertise, default_port=0) if advertise else None
    if own is None and coordinator.is_loopback:
        return Endpoint("127.0.0.1" if coordinator.host == "localhost" else coordinator.host, 0)
    while True:
        problem: PacelineError
        try:
            found = await patience.look_up(coordinator.host)
            if own is None:
                return Endpoint(await _way_to(coordinator.port, found), 0)
        except OSError as error:
            problem = CoordinatorUnreachable(f"cannot reach the coordinator at {coordinator}: {_words(error)}")
        else:
            try:
                await patience.look_up(own.host)
                return own
            except OSError as error:
                problem = LinkUnavailable(
                    f"this worker tells peers to reach it at {own.host!r} (`advertise`), but {_words(error)}"
                )
        await patience.wait(problem)


def listening_host(own: Endpoint, advertise: str | None) -> str:
    """Returns the host at which a worker with this address listens.

    This is the worker's own address, unless it was told to advertise it: that may be an address of another machine
    that forwards to this one, so the worker then listens on all interfaces, by IPv6 and IPv4. On loopback it stays on
    loopback.
    """
    if not advertise:
        return own.host
    if own.is_loopback:
        return "127.0.0.1" if own.host == "localhost" else own.host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  # asked for


async def is_refused(endpoint: Endpoint, timeout: float, *, knock_s: float = _KNOCK_S) -> bool:
    """Returns True if the host answers that no process listens on the port: the process is gone, not slow.

    False if nothing is proved. Raises OSError as `probe` does.
    """
    return await probe(endpoint, timeout, knock_s=knock_s) is False


async def probe(endpoint: Endpoint, timeout: float, *, knock_s: float = _KNOCK_S) -> bool | None:
    """Checks whether a process listens: True at any of the host's addresses, False if all refuse the connection.

    None if nothing is known: the name does not resolve, the host cannot be reached, or it does not answer in time.
    `timeout` is for the look-up and the addresses, which get at most `knock_s` of it.

    Raises:
        OSError: this process has no descriptor left, which says nothing about the other side.
    """
    try:
        async with asyncio.timeout(timeout):
            found = await look_up(endpoint.host)
            said = await asyncio.gather(*(_answers(target, endpoint.port, knock_s) for _, target in found))
    except OSError as error:  # TimeoutError is one
        if is_exhausted(error):
            raise
        return None
    return True if True in said else None if None in said or not said else False


class _Patience:
    """Tracks the time left for tries, and the last problem that was reported."""

    def __init__(self, timeout: float, say: Callable[[str], None], slow_s: float, retry_s: float) -> None:
        self._start = time.monotonic()
        self._timeout = timeout
        self._say = say
        self._slow_s = slow_s
        self._retry_s = retry_s
        self._said = ""

    async def look_up(self, host: str) -> Found:
        """Calls `look_up_within` with the time that is left."""
        patient = asyncio.get_running_loop().call_later(
            self._slow_s, lambda: self.say(f"still looking up the name {host!r}: the resolver has not answered yet")
        )
        try:
            return await look_up_within(host, max(self._slow_s, self._start + self._timeout - time.monotonic()))
        finally:
            patient.cancel()

    async def wait(self, problem: PacelineError) -> None:
        """Reports the problem and waits until the next try; raises the problem itself if no time is left."""
        left = self._start + self._timeout - time.monotonic()
        if left <= 0:
            raise problem
        self.say(str(problem))
        await asyncio.sleep(min(self._retry_s, left))

    def say(self, text: str) -> None:
        """Reports a text, if it differs from the last one."""
        if text != self._said:
            self._said = text
            self._say(text)


async def _way_to(port: int, found: Found) -> str:
    """Returns the address of this host's interface that leads to one of the addresses."""
    ways: dict[str, tuple[Any, ...]] = {}
    problem = OSError("it has no address")
    for family, target in found:
        try:
            ways.setdefault(_source(family, (target[0], port, *target[2:])), target)
        except OSError as error:
            problem = error
    if not ways:
        raise problem
    if len(ways) == 1:
        return next(iter(ways))
    for own, target in ways.items():
        if await _answers(target, port, _KNOCK_S):
            return own
    raise OSError(f"it answers at none of its addresses ({', '.join(str(target[0]) for target in ways.values())})")


def _source(family: socket.AddressFamily, target: tuple[Any, ...]) -> str:
    # A connected UDP socket sends nothing; it only asks the routing table.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        if family == socket.AF_INET6:
            with suppress(OSError):  # a temporary address would expire during a long run (RFC 5014; linux/in6.h)
                probe.setsockopt(socket.IPPROTO_IPV6, _IPV6_ADDR_PREFERENCES, _IPV6_PREFER_SRC_PUBLIC)
        probe.connect(target)
        own = str(probe.getsockname()[0])
    if family == socket.AF_INET6 and ipaddress.ip_address(own).is_link_local:
        raise ValueError(
            f"the coordinator is reached from {own}, a link-local address, which works only on this network link: give "
            "a coordinator address that routers know, or tell peers another address of this worker (`advertise`)"
        )
    return own


async def _answers(target: tuple[Any, ...], port: int, knock_s: float) -> bool | None:
    """Returns True if a process listens there, False if the connection is refused, None if neither shows in time."""
    try:
        async with asyncio.timeout(knock_s):
            scope = f"%{target[3]}" if target[3:] and target[3] else ""
            _, writer = await asyncio.open_connection(f"{target[0]}{scope}", port)
    except ConnectionRefusedError:
        return False
    except OSError as error:
        if is_exhausted(error):
            raise
        return None
    writer.close()
    return True


def _words(error: OSError) -> str:
    return error.strerror or str(error)
