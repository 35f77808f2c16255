"""The engine "gloo": PyTorch's Gloo sums gradients over TCP, one context for each group and generation.

Gloo cannot abort a sum. But a sum fails when Gloo reads the end of its sockets. So the engine holds a duplicate of each
socket of its context, from the start, and `abort` shuts down their reading sides.

Gloo sometimes loses an error: if a connection breaks while a message is partly read or waits to be written, Gloo does
not tell the sum that waits for this message, and nothing but Gloo's own timeout ends that wait. If `abort` shut down
the writing sides too, Gloo's next write would fail, and a quarter of all aborted sums would wait like this. Shutting
down the reading sides alone leaves about 1 in 200; those end after `patience`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import torch.distributed as dist

from paceline._base.arrays import Array
from paceline._base.waits import SLICE
from paceline._links.base import Peer
from paceline.engines import EngineFailed, EngineTimeout, EngineTraits, OnDevice, Ticket
from paceline.torch._c10d_engine import CONNECT_SECONDS, C10dEngine, C10dTicket, Call, called
from paceline.torch._contact_store import ContactStore

Address = tuple[str, int]
"""IP address and port."""

_listening = threading.Lock()
"""Held while a context makes its listener, so that two contexts do not take each other's for their own."""


class GlooEngine(C10dEngine["_GlooStore"]):
    """Sums with Gloo, over TCP. See `DataEngine`.

    Gloo's connections are neither encrypted nor authenticated. If a rank does not come while this one connects, Gloo
    waits for it in a thread of its own, which ends within a minute, perhaps after `close`.
    """

    name = "gloo"
    title = "Gloo"
    traits = EngineTraits(frozenset({"float32", "float64"}), same_bits=True, tensors=True, shards=True)

    def __init__(self) -> None:
        super().__init__()
        self._sockets: list[socket.socket] = []
        self._made = False
        """Whether the context is connected, or could not be."""

    def open(self, rank: int, peers: Sequence[Peer], patience: float) -> None:
        """See `DataEngine`. Members enter a sum together, so only a stalled one waits for longer than `patience`."""
        self._sum_timeout = timedelta(seconds=patience)
        super().open(rank, peers, patience)

    def reduce_scatter(self, x: Array | OnDevice) -> Ticket:
        """See `DataEngine`. All ranks sum all elements; so does c10d's scatter for Gloo, which cannot be aborted."""
        return self.all_reduce(x)

    def _make_store(self, rank: int) -> _GlooStore:
        return _GlooStore(rank)

    def _build(self, store: _GlooStore, rank: int, host: str) -> Any:
        group = _gloo(store, rank, self._size, host)
        self._sockets = list(store.sockets())
        if len(self._sockets) < self._size - 1:
            text = f"found {len(self._sockets)} of the {self._size - 1} sockets of Gloo, so it could not be aborted"
            raise EngineFailed(text)
        return group

    def _opened(self, *, wanted: bool) -> None:
        with self._lock:
            self._made = True
            if not wanted:  # it was aborted meanwhile
                _shut_down(self._sockets)

    def _ticket(self, call: Call) -> C10dTicket:
        return _GlooTicket(call)

    def _interrupt(self) -> None:
        with self._lock:
            opening = list(self._store.sockets()) if self._store is not None and not self._made else []
            _shut_down((*self._sockets, *opening))
        for connection in opening:
            connection.close()

    def _release(self, deadline: float) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for connection in sockets:
            connection.close()


def _gloo(store: _GlooStore, rank: int, size: int, host: str) -> Any:
    """Returns a `ProcessGroupGloo` that is connected to all ranks."""
    options = dist.ProcessGroupGloo._Options()
    with _listening:
        before = set(_listeners())
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        store.listeners = set(_listeners()) - before
    options._timeout = timedelta(seconds=CONNECT_SECONDS)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, size, options)


class _GlooTicket(C10dTicket):
    """An operation under way in Gloo's thread; it keeps the array alive while Gloo uses it."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call: Any = call
        self._works: list[Any] = []
        """c10d's handle; let go of when the sum is over, because it keeps Gloo's context alive."""
        self._why = ""

    def start(self, group: Any) -> None:
        """See `C10dTicket`."""
        self._works.extend(called(group, self._call))

    def done(self) -> bool:
        """See `Ticket`."""
        left = self.left  # first: afterwards no handle comes
        return all(work.is_completed() for work in list(self._works)) and left

    def wait(self, deadline: float) -> None:
        """See `Ticket`."""
        while not self.left or self._works:
            works, left = list(self._works), deadline - monotonic()  # another thread may let go of it
            over = bool(works) and works[0].is_completed()
            if not over and left <= 0:
                raise EngineTimeout("Gloo has not finished in time")
            if not works:  # another thread is about to start it
                threading.Event().wait(0.001)
                continue
            work = works[0]
            try:
                work.wait(timedelta(seconds=min(SLICE, max(left, 0.001))))
            except RuntimeError as error:
                if not over:  # the time was over, or the sum has just failed: ask again
                    continue
                self._why = f"Gloo: {str(error).splitlines()[0][:500]}"
            self._works, self._call = [], None
        if self._why:
            raise EngineFailed(self._why)


class _GlooStore(ContactStore):
    """The contacts of Gloo, with the addresses at which contexts listen; `listeners` are this context's."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.listeners: set[Address] = set()
        self._theirs: set[Address] = set()

    def more(self, written: bytes) -> dict[str, Any]:
        """Returns this context's listeners: the ports that Gloo has told."""
        self.listeners = {where for where in self.listeners if where[1].to_bytes(2, "big") in written}
        return {"listeners": sorted(self.listeners)}

    def read_more(self, told: Mapping[str, Any]) -> None:
        """Notes the listeners of another rank."""
        self._theirs |= {(str(host), int(port)) for host, port in told["listeners"]}

    def sockets(self) -> Iterator[socket.socket]:
        """Yields duplicates of this context's connections: one end of each is a listener of this or another rank.

        The ranks of one process see each other's too; an abort ends all of these ranks anyway.
        """
        found: set[tuple[Address, Address]] = set()
        for connection in _tcp_sockets():
            try:
                ends = connection.getsockname()[:2], connection.getpeername()[:2]
                if ends not in found and (ends[0] in self.listeners or ends[1] in self._theirs):
                    found.add(ends)
                    yield connection
                    continue
            except OSError:  # it is not connected
                pass
            connection.close()


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yields a duplicate of each TCP socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        # Closing a duplicate of a file would end all locks that this process has on it (fcntl(2)).
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            # It was closed meanwhile. Or it is a file now, whose duplicate stays open, for the sake of its locks.
            continue
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            yield connection
        else:
            connection.close()


def _listeners() -> Iterator[Address]:
    """Yields the addresses at which this process listens."""
    for connection in _tcp_sockets():
        with connection:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                host, port = connection.getsockname()[:2]
                yield host, port


def _shut_down(sockets: Iterable[socket.socket]) -> None:
    for connection in sockets:
        with contextlib.suppress(OSError):  # the other side has ended it
            connection.shutdown(socket.SHUT_RD)
