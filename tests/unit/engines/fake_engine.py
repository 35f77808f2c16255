"""Engines for tests, whose ranks are threads of one process: one as simple as can be, one that never completes a sum,
and Paceline's own links seen as an engine.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

import numpy as np

from paceline._base.arrays import Array
from paceline._base.waits import Latch
from paceline._base.work import Work
from paceline._group import Group
from paceline._links.base import Peer
from paceline.engines import DataEngine, EngineFailed, EngineTimeout, EngineTraits, Ticket
from paceline.errors import PacelineError
from paceline.testing import local_groups

__all__ = ["FakeEngine", "HangingEngine", "LinkEngine", "connected_engine", "engines_of", "link_engines", "makers"]

makers: dict[str, Callable[[], DataEngine]] = {}
"""Makers of the engines "test" and "other", which tests/paceline_test_engines-0.dist-info names as a plug-in would."""


def connected_engine(group: Group) -> DataEngine:
    """Opens the engine of a group, and returns it once all ranks are connected; a collective.

    A test whose ranks leave before that may leave a thread behind: Gloo waits up to a minute for a rank that has left.
    """
    engine = group._core.open_engine()
    assert engine is not None
    engine.await_ready(monotonic() + 30.0)
    group.barrier()
    return engine


def make_test() -> DataEngine:
    return makers["test"]()


def make_other() -> DataEngine:
    return makers["other"]()


class _FakeTicket(Ticket):
    """An operation that somebody else ends: `combine` makes its result from the `x` of all ranks."""

    def __init__(self, x: Array, combine: Callable[[Array], Array]) -> None:
        self.x, self.combine = x, combine
        self.over = Latch()
        self.why = ""

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self, deadline: float) -> None:
        if not self.over.wait(max(0.0, deadline - monotonic())):
            raise EngineTimeout("the fake sum is not there")
        if self.why:
            raise EngineFailed(self.why)


def parts_of(given: Array) -> Array:
    """Returns the part of each rank, one after the other, from what all ranks have: shape [W, W S]."""
    return np.concatenate([np.split(x, len(given))[rank] for rank, x in enumerate(given)])


class _Hub:
    """The sums of one world: the last rank that starts one adds it up."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.started: dict[int, dict[int, _FakeTicket]] = {}

    def start(self, number: int, rank: int, ticket: _FakeTicket) -> None:
        with self.lock:
            if ticket.done():
                return
            of_all = self.started.setdefault(number, {})
            of_all[rank] = ticket
            if len(of_all) < self.size or any(other.done() for other in of_all.values()):
                return
            given = np.stack([of_all[each].x for each in range(self.size)])
            for other in self.started.pop(number).values():
                other.x[:] = other.combine(given)
                other.over.set()


_hubs: dict[str, _Hub] = {}
_names = itertools.count()


class FakeEngine(DataEngine):
    """Adds up in the thread of the rank that comes last."""

    name = "fake"
    traits = EngineTraits(frozenset({"float32", "float64"}), same_bits=True, shards=True)

    def __init__(self) -> None:
        self.ready = Latch()
        self.aborts = self.sums = 0
        self.started = threading.Event()
        self._why = ""
        self._tickets: list[_FakeTicket] = []
        self._hub: _Hub | None = None

    def open(self, rank: int, peers: Sequence[Peer], patience: float) -> None:
        self.rank = rank
        self._name = f"hub {next(_names)}"
        if not rank:
            _hubs[self._name] = _Hub(len(peers))

    def contact(self, deadline: float) -> bytes:
        return self._name.encode()

    def connect(self, contacts: Sequence[bytes]) -> None:
        self._hub = _hubs[contacts[0].decode()]
        self.ready.set()

    def await_ready(self, deadline: float) -> None:
        if not self.ready.wait(max(0.0, deadline - monotonic())):
            raise EngineTimeout("the fake engine is not ready")
        if self._why:
            raise EngineFailed(self._why)

    def all_reduce(self, x: Array) -> Ticket:
        return self._start(_FakeTicket(x, lambda given: given.sum(0)))

    def all_gather(self, x: Array) -> Ticket:
        return self._start(_FakeTicket(x, parts_of))

    def reduce_scatter(self, x: Array) -> Ticket:
        return self._start(_FakeTicket(x, lambda given: given.sum(0)))

    def _start(self, ticket: _FakeTicket) -> Ticket:
        if self._why:
            raise EngineFailed(self._why)
        assert self._hub is not None
        self._tickets.append(ticket)
        self.sums += 1
        self.started.set()
        self.begin(self._hub, len(self._tickets), ticket)
        return ticket

    def begin(self, hub: _Hub, number: int, ticket: _FakeTicket) -> None:
        hub.start(number, self.rank, ticket)

    def abort(self) -> None:
        self.aborts += 1
        self._end("the fake engine was aborted")
        self.ready.set()

    def _end(self, why: str) -> None:
        self._why = self._why or why
        if self._hub is not None:
            with self._hub.lock:
                for ticket in self._tickets:
                    if not ticket.done():
                        ticket.why = why
                        ticket.over.set()

    def drained(self, deadline: float) -> bool:
        return all(ticket.over.wait(max(0.0, deadline - monotonic())) for ticket in self._tickets)

    def close(self, deadline: float) -> None:
        self.drained(deadline)
        self._end("the fake engine is closed")


class HangingEngine(FakeEngine):
    """Completes no sum: each ends only by `abort`."""

    name = "hanging"

    def begin(self, hub: _Hub, number: int, ticket: _FakeTicket) -> None:
        """Nothing happens."""


@contextmanager
def engines_of(make: Callable[[], DataEngine], size: int) -> Iterator[list[DataEngine]]:
    """Yields engines, which it closes."""
    engines = [make() for _ in range(size)]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.abort()
        for engine in engines:
            engine.close(monotonic() + 1)


class _LinkTicket(Ticket):
    def __init__(self, work: Work[Array]) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.done()

    def wait(self, deadline: float) -> None:
        if not self._work._over.wait(max(0.0, deadline - monotonic())):
            raise EngineTimeout("the links have not finished the sum")
        if (error := self._work.exception()) is not None:
            raise EngineFailed(str(error))


class LinkEngine(DataEngine):
    """Paceline's links as an engine: the group of local links that `link_engines` made."""

    name = "links"
    traits = EngineTraits(frozenset({"float32", "float64", "int64"}), same_bits=True)

    def __init__(self) -> None:
        self.group = local_groups(1)[0]
        self._open = Latch()
        self._why = ""

    def open(self, rank: int, peers: Sequence[Peer], patience: float) -> None:
        """The links are there."""

    def contact(self, deadline: float) -> bytes:
        return b""

    def connect(self, contacts: Sequence[bytes]) -> None:
        self._open.set()

    def await_ready(self, deadline: float) -> None:
        if not self._open.wait(max(0.0, deadline - monotonic())):
            raise EngineTimeout("not connected")
        if self._why:
            raise EngineFailed(self._why)

    def all_reduce(self, x: Array) -> Ticket:
        try:
            return _LinkTicket(self.group.all_reduce(x, out=x, async_op=True))
        except PacelineError as error:
            raise EngineFailed(str(error)) from error

    def abort(self) -> None:
        self._why = self._why or "the engine was aborted"
        self._open.set()
        self.group._core.mesh.fault.broke(EngineFailed(self._why))

    def drained(self, deadline: float) -> bool:
        lane = self.group._core.bound.lane
        ended = threading.Event()
        threading.Thread(target=lambda: (lane.flush(), ended.set()), daemon=True).start()
        return ended.wait(max(0.01, deadline - monotonic()))

    def close(self, deadline: float) -> None:
        self.group.close(max(0.0, deadline - monotonic()), drain=0.0)


@contextmanager
def link_engines(size: int) -> Iterator[list[DataEngine]]:
    """Yields the engines of a world of local links."""
    engines = [LinkEngine() for _ in range(size)]
    for engine, group in zip(engines, local_groups(size), strict=True):
        engine.group.close()
        engine.group = group
    try:
        yield list(engines)
    finally:
        for engine in engines:
            engine.abort()
        for engine in engines:
            engine.close(monotonic() + 10)
