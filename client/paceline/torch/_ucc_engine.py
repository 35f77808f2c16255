"""The engine "ucc": UCC sums gradients on the CPU. It has never run with UCC, which is in no wheel of torch.

It was written from the source of torch's ProcessGroupUCC.cpp and UCCUtils.cpp. UCC chooses its algorithms itself, so
its `allreduce` may give each rank other bits. Here one rank gets each element's sum (reduce-scatter), and the others
get a copy of its bytes (all-gather): all ranks have the same bits, whatever UCC chooses.

UCC cannot abort a collective. So it never gets the caller's array: pieces of it are copied into the engine's memory
and back, and after an abort UCC keeps that memory until c10d's timeout ends what is under way.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, cast

import torch
import torch.distributed as dist

from paceline._base.arrays import Array
from paceline._base.waits import Latch
from paceline._engines.data_engine import EngineFailed, EngineTimeout, EngineTraits, OnDevice
from paceline._engines.variables import set_variables
from paceline.torch._c10d_engine import CONNECT_SECONDS, C10dEngine, C10dTicket, tensor_in
from paceline.torch._contact_store import ContactStore
from paceline.torch._tensors import Tensor

_PIECE_BYTES = 4 << 20
"""Bytes that are summed at a time: an abort may wait for one copy of them, which takes a millisecond."""

_SUM_LIMIT = timedelta(seconds=60)
"""c10d's timeout of a collective. It is longer than any failure takes to be noticed; an aborted one ends by it."""

_POLL = 0.0002
"""Seconds between two looks at a collective."""

_LOOK = 0.001
"""Seconds between two looks at a key."""

_END_SECONDS = 1.0
"""Seconds for which `close` waits for the other ranks to close: UCC's communicator meets them when it ends."""

_ADDRESS = "paceline/store"
"""The key of the contact: where rank 0's store is."""

set_variables("ucc")


class UccEngine(C10dEngine["_UccStore"]):
    """Sums with UCC. Never run: no wheel of torch has it. See `DataEngine`.

    UCC neither encrypts nor authenticates, and nor does the store that its ranks meet in. After an abort UCC's thread
    tries to finish what was under way for up to a minute, and takes a core for it.
    """

    name = "ucc"
    title = "UCC"
    traits = EngineTraits(frozenset({"float32", "float64"}), same_bits=True, tensors=True)

    def __init__(self) -> None:
        super().__init__()
        self._make_group: Any = getattr(dist, "ProcessGroupUCC", None)
        if self._make_group is None:
            raise ImportError(f"torch {torch.__version__} has no ProcessGroupUCC")
        self._group: Any = None
        """The process group, until the thread that sums has it. Its destructor may wait for UCC, so that thread alone
        lets go of it."""
        self._aborted = Latch()
        self._copying = threading.Lock()
        """Held while arrays are touched; none is touched any more once `_aborted` is set."""
        self._sums: queue.SimpleQueue[_UccTicket | None] = queue.SimpleQueue()
        """Sums that have not begun, in order; None ends the thread that sums."""
        self._summer: threading.Thread | None = None

    def _make_store(self, rank: int) -> _UccStore:
        return _UccStore(rank)

    def _build(self, store: _UccStore, rank: int, host: str) -> Any:
        store.open(rank, host)
        self._group = self._make_group(store, rank, self._size, _SUM_LIMIT)
        self._sum(self._group, torch.ones(self._size), torch.empty(1))  # c10d connects in the first collective
        return self._sums

    def _opened(self, *, wanted: bool) -> None:
        if wanted:
            summer = threading.Thread(target=self._sum_all, name="paceline-engine-sums", daemon=True)
            summer.start()
            self._summer = summer
        else:
            self._group = None

    def _ticket(self, x: Array | OnDevice) -> C10dTicket:
        return _UccTicket(x)

    def _interrupt(self) -> None:
        self._give_up("the engine was aborted")

    def _release(self, deadline: float) -> None:
        del deadline
        self._sums.put(None)
        patience = 0.0 if self._aborted.is_set() else _END_SECONDS
        if self._summer is not None:
            self._summer.join(patience)
        if self._store is not None:
            self._store.stop("the engine is closed")  # a communicator that ends waits no more for the other ranks
        if self._summer is not None:
            self._summer.join(patience)

    def _give_up(self, why: str) -> None:
        """Ends all sums. When it returns no array is touched any more."""
        self._aborted.set()
        with self._copying:
            for ticket in cast("list[_UccTicket]", self._works):
                ticket.end(why)
        self._sums.put(None)

    def _sum_all(self) -> None:
        """Sums until the engine is closed or aborted; in a thread of its own."""
        group, self._group = self._group, None
        each = _PIECE_BYTES // self._size // 8 * 8
        memory, mine = (torch.empty(size, dtype=torch.uint8) for size in (each * self._size, each))
        while (ticket := self._sums.get()) is not None:
            try:
                self._sum_pieces(group, ticket, memory, mine)
            except Exception as error:  # noqa: BLE001  waits raise it
                why = f"{self.title}: {str(error).splitlines()[0][:500]}"
                self._end(why)
                self._give_up(why)
        del group  # waits until UCC has ended what was under way, and until then it may use the memory
        del memory, mine

    def _sum_pieces(self, group: Any, ticket: _UccTicket, memory: Tensor, mine: Tensor) -> None:
        """Makes one sum, unless the engine is aborted."""
        if (x := ticket.x) is None:
            return
        memory, mine = memory.view(x.dtype), mine.view(x.dtype)
        for part in x.split(len(memory)):
            share = -(-len(part) // self._size)
            piece = memory[: share * self._size]
            with self._copying:
                if self._aborted.is_set():
                    return
                piece[: len(part)] = part
            piece[len(part) :] = 0
            self._sum(group, piece, mine[:share])
            with self._copying:
                if self._aborted.is_set():
                    return
                part.copy_(piece[: len(part)])
        ticket.end()

    def _sum(self, group: Any, piece: Tensor, mine: Tensor) -> None:
        """Sums memory of the engine over all ranks, in place.

        Args:
            group: the process group.
            piece: the memory, shape [W * n].
            mine: memory for this rank's share of the sums, shape [n].

        Raises:
            EngineFailed: the engine was aborted; c10d may still use the memory.
            RuntimeError: c10d has failed.
        """
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.SUM
        self._await(group._reduce_scatter_base(mine, piece, options))
        self._await(group._allgather_base(piece, mine))

    def _await(self, work: Any) -> None:
        """Waits for a collective."""
        while not work.is_completed():
            if self._aborted.wait(_POLL):
                raise EngineFailed("the engine was aborted")
        work.wait()  # raises its error


class _UccTicket(C10dTicket):
    """A sum under way.

    Args:
        x: the array.

    Attributes:
        x: a tensor over the array; None once nothing touches it any more.
    """

    def __init__(self, x: Array | OnDevice) -> None:
        super().__init__()
        self.x: Tensor | None = tensor_in(x)
        self._given: list[None] = []
        """Not empty if the thread that sums was given this sum."""
        self._over = Latch()
        self._why = ""

    def start(self, group: Any, options: Any) -> None:
        """See `C10dTicket`; `group` is the queue of sums."""
        del options
        self._given.extend(map(group.put, (self,)))  # one call into C, so no interrupt comes in between

    def end(self, why: str = "") -> None:
        """Ends the sum, if it is not over; with a reason, it has failed."""
        if not self._over.is_set():
            self._why, self.x = why, None
            self._over.set()

    def done(self) -> bool:
        """See `Ticket`."""
        left = self.left  # first: afterwards it is not given to anybody
        return self._over.is_set() or (left and not self._given)

    def wait(self, deadline: float) -> None:
        """See `Ticket`."""
        if self.done() and not self._over.is_set():
            return
        if not self._over.wait(max(0.0, deadline - monotonic())):
            raise EngineTimeout("UCC has not finished the sum in time")
        if self._why:
            raise EngineFailed(self._why)


class _UccStore(ContactStore):
    """The store that UCC's ranks meet in: a `TCPStore` at rank 0, whose address is the one contact.

    c10d sets, reads and deletes the same keys in several rounds, also when a communicator ends.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank, tells_at_once=True)
        self._keys: Any = None
        self._stopped = ""

    def open(self, rank: int, host: str) -> None:
        """Opens the store at rank 0, and connects to it at the others.

        Raises:
            Exception: it cannot be reached.
        """
        limit = timedelta(seconds=CONNECT_SECONDS)
        if rank == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family)
            port = listener.getsockname()[1]
            self._keys = dist.TCPStore(
                host, port, None, True, limit, False, master_listen_fd=listener.detach(), use_libuv=False
            )
            super().set(_ADDRESS, json.dumps([host, port]))
        else:
            host, port = json.loads(super().get(_ADDRESS))
            self._keys = dist.TCPStore(str(host), int(port), None, False, limit, False, use_libuv=False)

    def stop(self, why: str) -> None:
        """Ends all waits, and lets none begin."""
        self._stopped = self._stopped or why
        super().stop(why)

    # Called by torch.

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key."""
        self._opened().set(key, value)

    def get(self, key: str) -> bytes:
        """Waits for a key, and returns its value."""
        self.wait([key])
        return bytes(self._opened().get(key))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, and returns the sum."""
        return int(self._opened().add(key, amount))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist."""
        del timeout  # the fault of the generation ends the wait
        if self._keys is None:
            super().wait(keys)  # for the contact
            return
        while not self.check(keys):
            sleep(_LOOK)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns True if all keys exist."""
        return bool(self._opened().check(list(keys)))

    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns False if it did not exist."""
        return bool(self._opened().delete_key(key))

    deleteKey = delete_key  # the name that C++ asks for

    def _opened(self) -> Any:
        """Returns the TCPStore.

        Raises:
            EngineFailed: the engine was aborted or closed.
        """
        if self._stopped:
            raise EngineFailed(self._stopped)
        return self._keys
