"""Limits how much of the coordinator's memory and time one payer gets, and finds the payer of a call. Pure.

*Memory.* A payer may hold at most as much as it leaves free. One that takes all it can gets half, two get a third each,
and the next one finds as much free (Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet
Switches", 1998). So no memory is set aside for payers that do not use it, and no payer can take everything.

*Time.* If a payer sends faster than its rate, we read it more slowly. We refuse no caller for being fast: an honest
burst is delayed for a moment, and a flood waits in its sender's own buffers (HTTP/2 flow control) while we serve all
others. HTTP, where a request that waits takes a connection, refuses what would wait for long.

*Places.* If all places are taken, the caller with the most of them loses its oldest, and whoever comes gets a place.

*Payer.* The payer is the set of jobs that the call's token is good for, on all connections; without such a token, it is
the caller's address. So all calls of one job count together, and opening more connections does not help. A token for
all jobs does not tell the job, so callers with one are told apart by their addresses. Callers without a valid token
are, too; they are separate payers even at an address that they share with others.
"""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar
from urllib.parse import unquote

from paceline_server.errors import Unauthenticated
from paceline_server.security.tokens import Tokens

T = TypeVar("T", bound=Hashable)


class Budget:
    """A number of bytes, or of other things, and how many of them each payer holds."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._held: dict[Hashable, int] = {}

    def held(self, who: Hashable) -> int:
        """Returns the bytes that a payer holds."""
        return self._held.get(who, 0)

    def take(self, who: Hashable, size: int, spare: int = 0) -> bool:
        """Gives a payer more bytes. Gives none and returns False if the payer would then hold more than it leaves free.

        The payer must be able to take `spare` bytes afterwards.
        """
        if not self.has_room(who, size + spare):
            return False
        self.add(who, size)
        return True

    def has_room(self, who: Hashable, size: int) -> bool:
        """Returns True if the payer would not hold more than it leaves free with so many bytes more."""
        return self.held(who) + size <= self.total - self.used - size

    def add(self, who: Hashable, size: int) -> None:
        """Counts bytes that a payer already holds, or gives back (below 0)."""
        self.used += size
        self._held[who] = self.held(who) + size
        if not self._held[who]:
            del self._held[who]


class Pacer:
    """A token bucket: lets `burst` messages through at once, and then `rate` messages a second."""

    __slots__ = ("_at", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = now

    def delay(self, now: float, most: float = math.inf) -> float:
        """Counts one message; returns the seconds to wait before it is served, 0 in most cases.

        A message that would have to wait for longer than `most` is not counted, since it is refused.
        """
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        delay = max(0.0, (1.0 - self._tokens) / self._rate)
        if delay <= most:
            self._tokens -= 1.0
        return delay


class Pacers:
    """A pacer for each caller, `most` at most. Drops the one that was quiet longest: its next bucket is full."""

    def __init__(self, rate: float, burst: float, most: int) -> None:
        self._rate = rate
        self._burst = burst
        self._most = most
        self._pacers: OrderedDict[Hashable, Pacer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pacers)

    def delay(self, caller: Hashable, now: float, most: float = math.inf) -> float:
        """See `Pacer.delay`."""
        pacer = self._pacers.get(caller)
        if pacer is None:
            pacer = self._pacers[caller] = Pacer(self._rate, self._burst, now)
            if len(self._pacers) > self._most:
                self._pacers.popitem(last=False)
        self._pacers.move_to_end(caller)
        return pacer.delay(now, most)


class Places(Generic[T]):
    """Places that callers hold. If one too many is taken, the caller with the most loses its oldest.

    So a caller with few places keeps them whatever others do, and whoever comes gets one.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._owners: dict[T, Hashable] = {}
        self._held: dict[Hashable, OrderedDict[T, None]] = {}

    @property
    def used(self) -> int:
        """The places that are held."""
        return len(self._owners)

    def take(self, who: Hashable, place: T) -> T | None:
        """Gives a caller a place; returns the one that has to give way, if any: it is free already."""
        self._owners[place] = who
        self._held.setdefault(who, OrderedDict())[place] = None
        if self.used <= self.total:
            return None
        largest = max(self._held.values(), key=len)
        oldest = next(iter(largest))
        self.free(oldest)
        return oldest

    def free(self, place: T) -> None:
        """Takes note that a place is held no more; it may be free already."""
        if place in self._owners:
            who = self._owners.pop(place)
            del self._held[who][place]
            if not self._held[who]:
                del self._held[who]


_UNKNOWN = "unknown callers"

_IPV6_HOST_BITS = 64
"""A host with one IPv6 address usually has all addresses that differ only in these bits (RFC 6177)."""


def payer(tokens: Tokens | None, authorization: str | None, peer: str) -> str:
    """Returns the payer of a call, in words.

    `tokens` is None if callers need none. grpc writes `peer`: "ipv4:10.0.0.5:4711", "ipv6:%5B::1%5D:4711", "unix:".
    """
    address = _address(peer)
    if tokens is None:
        return address
    try:
        jobs = tokens.grant(authorization).jobs
    except Unauthenticated:
        return f"{_UNKNOWN} at {address}"
    return address if jobs is None else in_words(jobs)


def is_unknown(payer: str) -> bool:
    """Returns True if these callers need a valid token, and have none."""
    return payer.startswith(_UNKNOWN)


def in_words(jobs: Collection[str]) -> str:
    """Returns the payer of calls or sessions with a token for these jobs."""
    return f"job{'s'[: len(jobs) - 1]} {', '.join(map(repr, sorted(jobs)))}"


def peer_of(host: str) -> str:
    """Returns a caller's IP address, as sockets have it, in the form that `payer` takes."""
    return f"ip:[{host.partition('%')[0]}]:0"


def _address(peer: str) -> str:
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return kind
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 128 - _IPV6_HOST_BITS), strict=False))
    return str(address)
