"""The base of all engines that are process groups of c10d (Gloo, NCCL, XCCL, UCC), one for each group and generation.

A process group is built directly, with no default group and no rendezvous of torch. Members tell each other its
addresses as contacts, over links; it reads them through a store that has nothing else (`_contact_store`).
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Generic, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from paceline._base.arrays import Array
from paceline._base.waits import Outcome
from paceline._links.base import Peer
from paceline.engines import DataEngine, EngineFailed, EngineTimeout, OnDevice, Ticket
from paceline.torch._contact_store import ContactStore
from paceline.torch._tensors import Tensor, tensor_of

CONNECT_SECONDS = 10.0
"""Seconds in which all ranks must connect once they have each other's contacts."""

EVER = timedelta(days=365)
"""A timeout that never ends a sum: the generation's fault and the caller's deadline decide."""

StoreT = TypeVar("StoreT", bound=ContactStore)


class Call(NamedTuple):
    """A call of c10d."""

    method: str
    """Name of a method of a process group."""
    arguments: tuple[Any, ...]
    x: Array | OnDevice
    """The array that it reads and writes."""


class C10dEngine(DataEngine, Generic[StoreT]):
    """Sums with a process group of c10d. See `DataEngine`.

    A subclass says how the group is built and aborted, and what a ticket is. c10d is never called while a lock of the
    engine is held: it may wait for long, and `abort` must not. `title` is the library's name in texts.
    """

    title: str

    _sum_timeout = EVER
    """c10d's own timeout of a sum."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: StoreT | None = None
        self._ready: Outcome[Any] = Outcome()  # the process group
        self._ended = ""
        """Why no more sums may be started; empty while they may."""
        self._works: list[C10dTicket] = []
        self._maker: threading.Thread | None = None
        self._rank = self._size = 0

    @abc.abstractmethod
    def _make_store(self, rank: int) -> StoreT:
        """Returns the store that the group will read and write."""

    @abc.abstractmethod
    def _build(self, store: StoreT, rank: int, host: str) -> Any:
        """Returns a process group that is connected to all ranks; called in a thread of its own."""

    @abc.abstractmethod
    def _ticket(self, call: Call) -> C10dTicket:
        """Returns the ticket of an operation that is not started yet."""

    @abc.abstractmethod
    def _interrupt(self) -> None:
        """Ends all sums, soon, and the opening; may be called any number of times, from any thread. Calls no c10d."""

    @abc.abstractmethod
    def _opened(self, *, wanted: bool) -> None:
        """Is called when the opening is over; not `wanted` if it has failed, or the engine was aborted or closed."""

    def _release(self, deadline: float) -> None:
        """Gives back what the subclass holds beside the group, when the engine is closed."""

    def open(self, rank: int, peers: Sequence[Peer], patience: float) -> None:
        """See `DataEngine`."""
        self._rank, self._size = rank, len(peers)
        self._store = self._make_store(rank)
        host = peers[rank].address.rpartition(":")[0].strip("[]") or "127.0.0.1"
        self._maker = threading.Thread(
            target=self._make, args=(self._store, rank, host), name="paceline-engine", daemon=True
        )
        self._maker.start()

    def contact(self, deadline: float) -> bytes:
        """See `DataEngine`."""
        assert self._store is not None, "contact() before open()"
        found: bytes = in_time(self._store.mine, deadline, f"{self.title} did not say how it is reached")
        return found

    def connect(self, contacts: Sequence[bytes]) -> None:
        """See `DataEngine`."""
        assert self._store is not None, "connect() before open()"
        self._store.meet(contacts)

    def await_ready(self, deadline: float) -> None:
        """See `DataEngine`."""
        in_time(self._ready, deadline, f"{self.title} has not connected to all ranks")

    def all_reduce(self, x: Array | OnDevice) -> Ticket:
        """See `DataEngine`."""
        return self._start(self._sum(x))

    def all_gather(self, x: Array | OnDevice) -> Ticket:
        """See `DataEngine`."""
        whole, options = tensor_in(x), AllgatherOptions()
        options.timeout = self._sum_timeout
        return self._start(Call("_allgather_base", (whole, self._part(whole), options), x))

    def reduce_scatter(self, x: Array | OnDevice) -> Ticket:
        """See `DataEngine`."""
        whole, options = tensor_in(x), dist.ReduceScatterOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.SUM, self._sum_timeout
        return self._start(Call("_reduce_scatter_base", (self._part(whole), whole, options), x))

    def _part(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a tensor."""
        return whole.chunk(self._size)[self._rank]

    def _sum(self, x: Array | OnDevice) -> Call:
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.SUM, self._sum_timeout
        return Call("allreduce", ([tensor_in(x)], options), x)

    def _start(self, call: Call) -> Ticket:
        group, ticket = self._ready.result(), self._ticket(call)
        works = [*(work for work in self._works if not work.done()), ticket]  # `done` asks c10d
        try:
            with self._lock:
                if self._ended:
                    raise EngineFailed(self._ended)
                self._works = works
            ticket.start(group)
        except RuntimeError as error:
            raise EngineFailed(self._ended or f"{self.title}: {str(error).splitlines()[0][:500]}") from error
        finally:
            ticket.left = True
        return ticket

    def abort(self) -> None:
        """See `DataEngine`."""
        self._end("the engine was aborted")
        self._interrupt()

    def drained(self, deadline: float) -> bool:
        """See `DataEngine`."""
        works = list(self._works)
        for work in works:
            with contextlib.suppress(EngineFailed, EngineTimeout):
                work.wait(deadline)
        while not (over := all(work.done() for work in works)) and monotonic() < deadline:
            sleep(0.001)  # aborted sums whose kernels have not left yet
        return over

    def close(self, deadline: float) -> None:
        """See `DataEngine`."""
        self._end("the engine is closed", wakes=False)
        if not self._ready.done() or not self.drained(deadline):
            self.abort()
            self.drained(monotonic() + CONNECT_SECONDS)
        if self._maker is not None:
            self._maker.join(max(0.0, deadline - monotonic()))
        works = [work for work in self._works if not work.done()]  # arrays live until kernels have left
        with self._lock:
            self._works = works
            self._ready = Outcome()
            self._ready.set_exception(EngineFailed(self._ended))  # frees the group, whose destructor ends its threads
        self._release(deadline)

    def _end(self, why: str, *, wakes: bool = True) -> None:
        """Lets no more sums begin; ends the opening, if it is under way."""
        with self._lock:
            self._ended = self._ended or why
        if wakes:
            self._fail(why)

    def _fail(self, why: str) -> None:
        """Ends all waits for the opening, if it is under way."""
        if self._store is not None:
            self._store.stop(why)
        with self._lock:
            if not self._ready.done():
                self._ready.set_exception(EngineFailed(why))

    def _make(self, store: StoreT, rank: int, host: str) -> None:
        """Makes the group; in a thread of its own."""
        group: Any = None
        try:
            group = self._build(store, rank, host)
        except Exception as error:  # noqa: BLE001  `await_ready` raises it
            self._fail(f"{self.title} could not connect at {host}: {error}")
        with self._lock:
            wanted = not self._ready.done() and not self._ended
            if wanted:
                self._ready.set_result(group)
        self._opened(wanted=wanted)


class C10dTicket(Ticket):
    """An operation that c10d is about to start, or has started. The engine knows it before c10d has the array.

    An interrupt (Ctrl-C) may come at any instruction of `start`, also when c10d has the array already. The caller sets
    `left` once `start` has returned, has raised, or will not be called.
    """

    def __init__(self) -> None:
        self.left = False

    @abc.abstractmethod
    def start(self, group: Any) -> None:
        """Starts the operation."""


def called(group: Any, call: Call) -> Iterator[Any]:
    """Returns an iterator that makes a call and yields c10d's handle.

    `list.extend` of it is one call into C: an interrupt cannot come between c10d's return and the list.
    """
    return map(getattr(group, call.method), *((argument,) for argument in call.arguments))


def tensor_in(x: Array | OnDevice) -> Tensor:
    """Returns the tensor, or one over an array's memory."""
    return x.tensor if isinstance(x, OnDevice) else tensor_of(x)


def in_time(outcome: Outcome[Any], deadline: float, what: str) -> Any:
    """Returns an outcome; raises EngineTimeout if the deadline passes first, EngineFailed if it is an error."""
    if not outcome.wait(max(0.0, deadline - monotonic())):
        raise EngineTimeout(what)
    return outcome.result()
