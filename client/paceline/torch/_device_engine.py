"""The engine for all libraries of c10d that sum on devices: NCCL, XCCL, UCC. XCCL and UCC were never run.

Sums and their marks are on streams (`_device_streams`). An array is let go of only when the mark behind its sum has
happened: kernels of an aborted communicator leave when they next look at its flag.

Each engine has two threads. One opens the group, and is done when all ranks have made a sum of one element: until then
a communicator may still be connecting, and a sum would wait for it. The other one, the ender, is there from the start
and ends the group: it alone calls c10d's `abort`, which may take long. It holds no lock, so nobody waits for it.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from math import inf
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from paceline._base.waits import Latch
from paceline.engines import EngineFailed, EngineTimeout, EngineTraits, OnDevice, Peer
from paceline.engines._variables import set_variables
from paceline.torch._c10d_engine import CONNECT_SECONDS, EVER, C10dEngine, C10dTicket, Call, called
from paceline.torch._contact_store import ContactStore
from paceline.torch._device_streams import DeviceStreams, Mark, streams_of
from paceline.torch._tensors import Tensor

_POLL = 0.0002
"""Seconds between two looks at a mark. Looking is a call into the driver, and a sum takes longer than this."""

_ERROR_POLL = 0.02
"""Seconds between two looks for an error of the communicator, for which c10d takes a lock."""

_END_SECONDS = 1.0
"""Seconds for which `close` waits for a communicator to end, and after which an abort is repeated."""

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})

_KNOWN = ("nccl", "xccl")
"""Libraries whose rank 0 tells the others one thing before they connect, whose `allreduce` gives all ranks the same
bits, and whose sums can be aborted. Of others nothing of it is expected."""

_ADDRESS = "paceline/store"
"""The key of the contact of rank 0 if its contact is the address of a store."""

_log = logging.getLogger("paceline.engines")

for _name in ("nccl", "ucc"):
    set_variables(_name)


class DeviceEngine(C10dEngine[ContactStore]):
    """Sums on a device, with a library that torch was built with. See `DataEngine`.

    Libraries that are not `_KNOWN` meet in a store at rank 0, neither encrypted nor authenticated. One rank sums each
    element and sends its bytes to the others. A sum that cannot be aborted ends by c10d's timeout. Tensors lie by
    default on the current device of the type that the library is for. `close` waits `end_s` seconds for a communicator
    to end, and an abort is repeated after as many.
    """

    def __init__(self, name: str, device: Any = None, *, end_s: float = _END_SECONDS) -> None:
        super().__init__()
        self._end_s = end_s
        self.name, self.title = name, name.upper()
        self._make_group: Any = getattr(dist, f"ProcessGroup{self.title}", None)
        if self._make_group is None:
            raise ImportError(f"torch {torch.__version__} has no ProcessGroup{self.title}")
        if device is None:
            device = _current(next(kind for kind in dist.Backend.backend_capability[name] if kind != "cpu"))
        self.device = device
        devices = frozenset({self.device.type})
        self.traits = EngineTraits(_FLOATS, same_bits=True, devices=devices, tensors=True, shards=True)
        self._streams: DeviceStreams = streams_of(self.device)
        # No other engine's sums wait in it: those of a dead generation, or of a group whose ranks start them in another
        # order beside ours.
        self._stream = self._streams.new()
        self._group: Any = None
        self._made = Latch()
        """Set when there is a group, which need not be connected, or when there will be none."""
        self._left = Latch()
        """Set when the opening thread calls c10d no more."""
        self._aborted = Latch()
        self._ending = Latch()
        """Set when the ender is to end the group."""
        self._connected = False
        self._closes_by = 0.0
        self._ender: threading.Thread | None = None

    def open(self, rank: int, peers: Sequence[Peer], patience: float) -> None:
        """See `DataEngine`."""
        if self.name not in _KNOWN:
            self._sum_timeout = timedelta(seconds=patience)
        super().open(rank, peers, patience)

    def _make_store(self, rank: int) -> ContactStore:
        self._ender = threading.Thread(target=self._end_group, name="paceline-engine-end", daemon=True)
        self._ender.start()
        return ContactStore(rank, tells_at_once=True)

    def _options(self) -> Any:
        """Returns the last argument of c10d's constructor."""
        if not hasattr(self._make_group, "Options"):
            return self._sum_timeout
        options = self._make_group.Options()
        options._timeout = EVER
        if hasattr(options, "config"):  # NCCL's
            options.config.blocking = 0
        return options

    def _build(self, store: ContactStore, rank: int, host: str) -> Any:
        try:
            keys = store if self.name in _KNOWN else _shared_store(store, rank, host)
            self._group = group = self._make_group(keys, rank, self._size, self._options())
        finally:
            self._made.set()
        if self._ending.is_set():
            raise EngineFailed(self._ended)
        with self._streams.here():
            if hasattr(group, "eager_connect_single_device"):
                group.eager_connect_single_device(self.device)  # may return while the communicator still connects
            first = self._ticket(self._sum(OnDevice(torch.zeros(1, device=self.device), self._streams.mark())))
            try:
                first.start(group)
            finally:
                first.left = True
            first.wait(inf)
        return group

    def _opened(self, *, wanted: bool) -> None:
        self._connected = wanted
        self._left.set()

    def _ticket(self, call: Call) -> C10dTicket:
        shares = self._size if call.method == "allreduce" and self.name not in _KNOWN else 0
        return _DeviceTicket(call, self._streams, self._stream, self._aborted, self._lose_if_broken, shares)

    def _lose_if_broken(self) -> str:
        """Ends the engine if its communicator has failed, and returns what has failed; empty if nothing has.

        Marks do not tell of that: the communicator's kernels wait for ever.
        """
        get_error = getattr(self._group, "get_error", None)  # torch 2.11 has it
        try:
            error = None if get_error is None or self._aborted.is_set() else get_error()
        except RuntimeError:  # this library tells none
            return ""
        if error is None or error.name == "SUCCESS":
            return ""
        why = f"{self.title} lost a rank, or the network to it ({error.name})"
        self._end(why)
        self._interrupt()
        return why

    def _interrupt(self) -> None:
        self._aborted.set()
        self._ending.set()

    def _release(self, deadline: float) -> None:
        self._closes_by = self._closes_by or max(deadline, monotonic() + self._end_s)
        self._ending.set()
        if self._ender is not None:
            self._ender.join(min(self._end_s, max(0.0, deadline - monotonic())))

    def _end_group(self) -> None:
        """Ends the group once the engine is aborted or closed; in a thread of its own."""
        self._ending.wait()
        self._made.wait()
        with self._streams.here():
            group = self._group
            if group is not None and not (self._connected and self._shuts_down(group)):
                self._abort_group(group)
            self._group = group = None  # its destructor ends its threads

    def _shuts_down(self, group: Any) -> bool:
        """Ends a group in order; returns False if the engine is aborted, or a rank does not answer in time."""
        if self._aborted.is_set():
            return False
        ended = Latch()

        def shut_down() -> None:
            try:
                group.shutdown()
                ended.set()
            except Exception as error:  # noqa: BLE001  the group is aborted then
                _log.warning("%s did not end in order: %s", self.title, error)

        closer = threading.Thread(target=shut_down, name="paceline-engine-close", daemon=True)
        closer.start()
        while closer.is_alive() and not self._aborted.is_set() and monotonic() < self._closes_by:
            closer.join(0.01)
        return ended.is_set()

    def _abort_group(self, group: Any) -> None:
        """Aborts a group, again and again while it still opens or has an array.

        A communicator that is made while `abort` runs is not aborted by it; and `abort` may fail.
        """
        told = False
        while True:
            try:
                group.abort()
            except Exception as error:  # noqa: BLE001  marks tell whether arrays are still touched
                if not told:
                    _log.error("%s could not be aborted, and is aborted again until it lets go: %s", self.title, error)
                told = True
            if self._left.wait(self._end_s) and self.drained(monotonic() + self._end_s):
                return


class _DeviceTicket(C10dTicket):
    """An operation under way on a device.

    Args:
        call: the call of c10d.
        stream: the stream for it.
        aborted: set when the engine is aborted.
        lose_if_broken: aborts the engine if its communicator has failed; returns why.
        shares: the number of ranks if each is to sum a share of the elements; 0 if `allreduce` will do.
    """

    def __init__(
        self,
        call: Call,
        streams: DeviceStreams,
        stream: Any,
        aborted: Latch,
        lose_if_broken: Callable[[], str],
        shares: int = 0,
    ) -> None:
        super().__init__()
        self._shares = shares
        self._streams = streams
        self._stream = stream
        self._aborted = aborted
        self._lose_if_broken = lose_if_broken
        self._call: Any = call
        self._held: Any = None
        """Tensors that must live until the operation is over, beside the array of the call."""
        self._works: list[Any] = []
        """c10d's handle."""
        self._mark: Mark | None = None
        """The mark behind the sum; None if there is none yet."""
        self._over = False
        self._why = ""

    def start(self, group: Any) -> None:
        """See `C10dTicket`."""
        call = self._call
        with self._streams.aside(self._stream):
            self._streams.wait_for(call.x.written if isinstance(call.x, OnDevice) else None)
            if self._shares:
                (x,), options = call.arguments
                self._sum_shares(group, x, options.timeout)
            else:
                self._works.extend(called(group, call))
            self._mark = self._mark_behind()

    def _sum_shares(self, group: Any, x: Tensor, timeout: timedelta) -> None:
        """Begins to sum each element at one rank, from which the others get its bytes."""
        share = -(-len(x) // self._shares)
        whole, mine = x.new_zeros(share * self._shares), x.new_empty(share)
        self._held = whole, mine
        whole[: len(x)] = x
        options = dist.ReduceScatterOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.SUM, timeout
        self._works.extend(map(group._reduce_scatter_base, (mine,), (whole,), (options,)))
        self._works[-1].wait()  # this stream waits, not the host
        self._works.extend(map(group._allgather_base, (whole,), (mine,)))
        self._works[-1].wait()
        x.copy_(whole[: len(x)])

    def _mark_behind(self) -> Mark | None:
        """Returns a mark behind what c10d has begun; called in the stream for sums."""
        for work in list(self._works):
            work.wait()  # this stream waits for it, not the host
        return self._streams.mark()

    def done(self) -> bool:
        """See `Ticket`."""
        left, mark = self.left, self._mark  # `left` first: afterwards `start` marks nothing
        if self._over or (not left and mark is None):
            return self._over
        try:
            if mark is None:  # `start` was interrupted, or c10d raised
                with self._streams.aside(self._stream):
                    mark = self._mark = self._mark_behind()
            over = mark is None or mark.happened()
        except RuntimeError as error:  # the device has failed: it runs nothing any more
            self._why, over = str(error).splitlines()[0][:700], True
        if over:
            if mark is not None and self._aborted.is_set():
                self._why = self._why or "the engine was aborted"
            self._call, self._held, self._works, self._over = None, None, [], True
        return over

    def wait(self, deadline: float) -> None:
        """See `Ticket`."""
        look = monotonic() + _ERROR_POLL
        while not self.done():
            now = monotonic()
            left = deadline - now
            if left <= 0:
                raise EngineTimeout("the device has not finished in time")
            if now >= look:
                self._why = self._why or self._lose_if_broken()
                look = now + _ERROR_POLL
            if self._aborted.is_set():
                sleep(min(_POLL, left))  # kernels leave when they next look at the flag
            else:
                self._aborted.wait(min(_POLL, left))
        if self._why:
            raise EngineFailed(self._why)


def _current(kind: str) -> Any:
    """Returns the current device of a type; ImportError if there is none, or torch was built without it."""
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        raise ImportError(f"torch {torch.__version__} finds no device of type {kind!r}")
    return torch.device(kind, module.current_device())


def _shared_store(contacts: ContactStore, rank: int, host: str) -> Any:
    """Returns a store at rank 0, for libraries whose ranks set and read keys in several rounds."""
    limit = timedelta(seconds=CONNECT_SECONDS)
    if rank:
        host, port = json.loads(contacts.get(_ADDRESS))
        return dist.TCPStore(str(host), int(port), None, False, limit, False, use_libuv=False)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    contacts.set(_ADDRESS, json.dumps([host, port]))
    return dist.TCPStore(host, port, None, True, limit, False, master_listen_fd=listener.detach(), use_libuv=False)


nccl = partial(DeviceEngine, "nccl")
xccl = partial(DeviceEngine, "xccl")
ucc = partial(DeviceEngine, "ucc")
