"""Cuts off strangers who make grpc keep more and more memory.

grpc reads a call's metadata before anybody can look at a token, and applies its own limit only to callers that have
acknowledged its settings. One that has not makes it keep some 150 bytes for each byte that it sends.

A thread reads the resident memory of this process 20 times a second. Once that has grown by `GROWTH_BYTES`, it looks
at the connections of the ports that it guards. It cuts off those that have sent more than `FREE_BYTES` and have made no
call that proves where its caller belongs. For `BLOCK_SECONDS` the kernel takes no packets from their addresses for
these ports, except on connections that they have already: a caller that comes again at once would cost as much again.
A caller that is kept out because it shares an address with a stranger gets in when it tries again.

It never cuts off a connection with such a call, no matter how much the process grows. So a worker whose own model takes
gigabytes loses nobody by it, and nobody in a handshake: members prove themselves with the first few hundred bytes that
they send. One exception is a caller whose first call on a connection has more than `FREE_BYTES`, such as a long list of
members: while the loop is busy it may be cut off before its token is looked at, and has to call again.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from urllib.parse import unquote

from pacelinepb.remarks import Remarks
from pacelinepb.server_sockets import LISTENS, Place, block, block_of, cut, descriptors, seen

__all__ = ["BLOCK_SECONDS", "FREE_BYTES", "GROWTH_BYTES", "Callers", "Looks", "MemoryGuard"]

_log = logging.getLogger(__name__)

GROWTH_BYTES = 32 << 20
"""Growth of the process's memory after which the guard looks at connections."""

FREE_BYTES = 4096
"""Bytes that each connection may send before its caller has proved anything. A member's token comes
within its first 421 bytes, after 1,445 of TLS. With 4,096 bytes a stranger makes grpc keep 0.6 MB."""

BLOCK_SECONDS = 1.0
"""Seconds for which an address is blocked. TCP sends the first packet of a connection again after 1 s, 3 s, ..."""

_POLL_S, _ALERT_POLL_S = 0.05, 0.005

_ALERT_S = 5.0
"""Seconds after the last cut for which the guard looks at the connections each time."""

_MOST_BLOCKED = 32

_REMARK_S = 60.0


class Callers:
    """The connections whose callers have proved that they belong here. One loop writes, and the guard's thread reads.

    Args:
        idle: seconds without a call after which grpc closes a connection. Until then it counts as proved, because a
            member may make its next call on it; later another caller may have the same address and port.
    """

    def __init__(self, idle: float) -> None:
        self._idle = idle
        self._calls: Counter[Place] = Counter()
        self._ended: dict[Place, float] = {}  # when the last call ended, in that order

    def came(self, peer: str) -> None:
        """Counts a call that has proved itself; `peer` is as grpc writes it ("ipv4:10.0.0.5:4711")."""
        self._calls[_place(peer)] += 1

    def went(self, peer: str, now: float) -> None:
        """Counts the end of a call that `came`."""
        place = _place(peer)
        self._calls[place] -= 1
        if self._calls[place]:
            return
        self._ended.pop(place, None)
        self._ended[place] = now
        del self._calls[place]  # last: the guard's thread must find the place in one of the two
        while (first := next(iter(self._ended))) != place and self._ended[first] < now - 2 * self._idle:
            del self._ended[first]

    @contextmanager
    def one(self, peer: str) -> Iterator[None]:
        """Counts a call that has proved itself for as long as the block lasts."""
        self.came(peer)
        try:
            yield
        finally:
            self.went(peer, time.monotonic())

    def calls(self, place: Place | None) -> bool:
        """Returns True if a call of this connection is open."""
        return place in self._calls

    def has(self, place: Place, now: float) -> bool:
        """Returns True if this connection has proved itself."""
        return place in self._calls or now - self._ended.get(place, -math.inf) < 2 * self._idle


class Looks:
    """Decides when to look at the connections. Pure; times are in seconds, memory in bytes."""

    def __init__(self, *, growth_bytes: int = GROWTH_BYTES) -> None:
        self._growth_bytes = growth_bytes
        self._low = math.inf
        self._next = self._alert_ends = -math.inf
        self.wait = _POLL_S

    def is_due(self, resident: float, now: float) -> bool:
        """Takes the process's memory; returns True if it has grown, or if there was a cut a moment ago."""
        self._low = min(self._low, resident)
        self.wait = _POLL_S
        return self.is_alert(now) or (resident > self._low + self._growth_bytes and now >= self._next)

    def is_alert(self, now: float) -> bool:
        """Returns True if there was a cut a moment ago."""
        return now < self._alert_ends

    def looked(self, resident: float, cuts: int, cost: float, now: float) -> None:
        """Takes note of a look.

        Args:
            resident: the process's memory before it.
            cuts: how many connections were cut off.
            cost: processor seconds that it took. A process that grows by itself pays at most a fiftieth of its time for
                looks in vain, and one under attack a tenth.
            now: the time.
        """
        self._low = resident
        if cuts:
            self._alert_ends = now + _ALERT_S
        self._next = now + 50 * cost
        self.wait = max(_ALERT_POLL_S, 10 * cost) if self.is_alert(now) else _POLL_S


class MemoryGuard:
    """Guards the ports of one grpc server. It does nothing on systems without Linux's /proc.

    Args:
        callers: those who have proved that they belong here.
        ports: the ports that the server listens at.
        growth_bytes: growth of the process's memory after which it looks at connections.
        block_s: seconds for which an address is blocked.

    Attributes:
        ports: as given; may be replaced.
    """

    def __init__(
        self,
        callers: Callers,
        ports: Collection[int],
        *,
        growth_bytes: int = GROWTH_BYTES,
        block_s: float = BLOCK_SECONDS,
    ) -> None:
        self.ports = ports
        self._callers = callers
        self._looks = Looks(growth_bytes=growth_bytes)
        self._block_s = block_s
        self._remarks = Remarks(_REMARK_S)
        self._seen: dict[int, Place] = {}  # by descriptor
        self._blocked: dict[bytes, float] = {}  # until when
        self._listeners: list[int] = []  # descriptors, as of the last look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        if not os.path.exists("/proc/self/statm"):
            return
        statm = os.open("/proc/self/statm", os.O_RDONLY)
        # At the limit of descriptors no new one can be had: a connection is put here while it is cut off.
        spare = os.open(os.devnull, os.O_RDONLY)
        page, was_alert = os.sysconf("SC_PAGE_SIZE"), False
        try:
            while not self._over.wait(self._looks.wait):
                resident, now = page * int(os.pread(statm, 100, 0).split()[1]), time.monotonic()
                if self._looks.is_due(resident, now):
                    began = time.thread_time()
                    cuts = self._look(spare, now)
                    self._looks.looked(resident, cuts, time.thread_time() - began, now)
                if was_alert and not self._looks.is_alert(now):
                    _give_back()
                was_alert = self._looks.is_alert(now)
        finally:
            os.close(spare)
            os.close(statm)

    def _look(self, spare: int, now: float) -> int:
        """Cuts off whom it must, and blocks their addresses; returns how many it cut off."""
        listeners, cuts = list[int](), 0
        blocked = {each: until for each, until in self._blocked.items() if now < until}
        for fd in descriptors():
            # A member that calls has kept its connection, and so its descriptor: most need no more than this.
            if self._callers.calls(self._seen.get(fd)) or (found := seen(fd, self.ports)) is None:
                continue
            place, received = found
            if place == LISTENS:
                listeners.append(fd)
                continue
            self._seen[fd] = place
            if received > FREE_BYTES and not self._callers.has(place, now) and cut(fd, spare, place):
                cuts += 1
                blocked[block_of(place[0])] = now + self._block_s
                self._remark(place[0], received, now)
        blocked = dict(list(blocked.items())[-_MOST_BLOCKED:])
        if blocked.keys() != self._blocked.keys() or (blocked and listeners != self._listeners):
            for fd in listeners:
                block(fd, blocked)
        self._blocked, self._listeners = blocked, listeners
        return cuts

    def _remark(self, host: str, received: int, now: float) -> None:
        if count := self._remarks.count("cut", now):
            _log.warning(
                "cut off a connection from %s: this process takes more and more memory, and the caller has sent %d "
                "bytes but has not proved that it belongs here; its address is blocked for %g s (%d since the "
                "last such line)",
                host,
                received,
                self._block_s,
                count,
            )


def _place(peer: str) -> Place:
    """Returns the place of a caller from grpc's words for it: "ipv4:10.0.0.5:4711", "ipv6:%5B::1%5D:4711"."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]").partition("%")[0], int(port)


def _give_back() -> None:
    """Gives free memory back to the system; malloc would keep what an attack has made it take."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
