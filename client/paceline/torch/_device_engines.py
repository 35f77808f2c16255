"""The engines "nccl" and "xccl": process groups of c10d that sum on devices. XCCL was never run.

Sums and their marks are on streams (`_device_streams`). An array is let go of only when the mark behind its sum has
happened: kernels of an aborted communicator leave when they next look at its flag.

Each engine has two threads. One opens the group, and is done when all ranks have made a sum of one element: until then
a communicator may still be connecting, and a sum would wait for it. The other one, the ender, is there from the start
and ends the group: it alone calls c10d's `abort`, which may take long. It holds no lock, so nobody waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from math import inf
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from paceline._base.arrays import Array
from paceline._base.waits import Latch
from paceline._engines.data_engine import EngineFailed, EngineTimeout, EngineTraits, OnDevice
from paceline._engines.variables import set_variables
from paceline.torch._c10d_engine import EVER, C10dEngine, C10dTicket, sum_options, tensor_in
from paceline.torch._contact_store import ContactStore
from paceline.torch._device_streams import DeviceStreams, Mark, streams_of

_POLL = 0.0002
"""Seconds between two looks at a mark. Looking is a call into the driver, and a sum takes longer than this."""

_ERROR_POLL = 0.02
"""Seconds between two looks for an error of the communicator, for which c10d takes a lock."""

_END_SECONDS = 1.0
"""Seconds for which `close` waits for a communicator to end, and after which an abort is repeated."""

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})

_log = logging.getLogger("paceline.engines")

set_variables("nccl")


class _DeviceEngine(C10dEngine[ContactStore]):
    """A process group of c10d on devices.

    Args:
        device: where tensors lie; by default the current one of the type that the engine is for.
    """

    device_type: str
    group_class: str
    """Name of the process group in `torch.distributed`."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self._make_group: Any = getattr(dist, self.group_class, None)
        if self._make_group is None:
            raise ImportError(f"torch {torch.__version__} has no {self.group_class}")
        self.device = _current(self.device_type) if device is None else device
        self._streams: DeviceStreams = streams_of(self.device)
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

    def _make_store(self, rank: int) -> ContactStore:
        self._ender = threading.Thread(target=self._end_group, name="paceline-engine-end", daemon=True)
        self._ender.start()
        return ContactStore(rank, tells_at_once=True)

    def _options(self) -> Any:
        options = self._make_group.Options()
        options._timeout = EVER
        return options

    def _build(self, store: ContactStore, rank: int, host: str) -> Any:
        try:
            self._group = group = self._make_group(store, rank, self._size, self._options())
        finally:
            self._made.set()
        if self._ending.is_set():
            raise EngineFailed(self._ended)
        if hasattr(group, "eager_connect_single_device"):
            group.eager_connect_single_device(self.device)  # may return while the communicator still connects
        first = self._ticket(OnDevice(torch.zeros(1, device=self.device), self._streams.mark()))
        try:
            first.start(group, sum_options())
        finally:
            first.left = True
        first.wait(inf)
        return group

    def _opened(self, *, wanted: bool) -> None:
        self._connected = wanted
        self._left.set()

    def _ticket(self, x: Array | OnDevice) -> C10dTicket:
        return _DeviceTicket(x, self._streams, self._aborted, self._lose_if_broken)

    def _lose_if_broken(self) -> str:
        """Ends the engine if its communicator has failed, which marks do not tell: its kernels wait for ever.

        Returns:
            What has failed; empty if nothing has.
        """
        get_error = getattr(self._group, "get_error", None)  # torch 2.11 has it
        error = None if get_error is None or self._aborted.is_set() else get_error()
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
        self._closes_by = self._closes_by or max(deadline, monotonic() + _END_SECONDS)
        self._ending.set()
        if self._ender is not None:
            self._ender.join(min(_END_SECONDS, max(0.0, deadline - monotonic())))

    def _end_group(self) -> None:
        """Ends the group once the engine is aborted or closed; in a thread of its own."""
        self._ending.wait()
        self._made.wait()
        group = self._group
        if group is not None and not (self._connected and self._shuts_down(group)):
            self._abort_group(group)
        self._group = None  # its destructor ends its threads

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
            if self._left.wait(_END_SECONDS) and self.drained(monotonic() + _END_SECONDS):
                return


class NcclEngine(_DeviceEngine):
    """Sums with NVIDIA's NCCL on GPUs. See `DataEngine`."""

    name = "nccl"
    title = "NCCL"
    device_type = "cuda"
    group_class = "ProcessGroupNCCL"
    traits = EngineTraits(_FLOATS, same_bits=True, devices=frozenset({"cuda"}), tensors=True)

    def _options(self) -> Any:
        options = super()._options()
        options.config.blocking = 0
        return options


class XcclEngine(_DeviceEngine):
    """Sums with Intel's oneCCL on GPUs. Never run: no wheel of torch for the CPU or for CUDA has it."""

    name = "xccl"
    title = "XCCL"
    device_type = "xpu"
    group_class = "ProcessGroupXCCL"
    traits = EngineTraits(_FLOATS, same_bits=True, devices=frozenset({"xpu"}), tensors=True)


class _DeviceTicket(C10dTicket):
    """A sum under way on a device.

    Args:
        x: the array.
        streams: the device's streams.
        aborted: set when the engine is aborted.
        lose_if_broken: aborts the engine if its communicator has failed; returns why.
    """

    def __init__(
        self, x: Array | OnDevice, streams: DeviceStreams, aborted: Latch, lose_if_broken: Callable[[], str]
    ) -> None:
        super().__init__()
        self._streams = streams
        self._aborted = aborted
        self._lose_if_broken = lose_if_broken
        self._held: Any = x
        """Everything that must live until the sum is over."""
        self._works: list[Any] = []
        """c10d's handle."""
        self._mark: Mark | None = None
        """The mark behind the sum; None if there is none yet."""
        self._over = False
        self._why = ""

    def start(self, group: Any, options: Any) -> None:
        """See `C10dTicket`."""
        x = self._held
        with self._streams.aside():
            self._streams.wait_for(x.written if isinstance(x, OnDevice) else None)
            calls = map(group.allreduce, ([tensor_in(x)],), (options,))
            self._works.extend(calls)  # one call into C: an interrupt cannot come between c10d's return and this list
            self._mark = self._mark_behind()

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
                with self._streams.aside():
                    mark = self._mark = self._mark_behind()
            over = mark is None or mark.happened()
        except RuntimeError as error:  # the device has failed: it runs nothing any more
            self._why, over = f"the device failed: {str(error).splitlines()[0][:500]}", True
        if over:
            if mark is not None and self._aborted.is_set():
                self._why = self._why or "the engine was aborted"
            self._held, self._works, self._over = None, [], True
        return over

    def wait(self, deadline: float) -> None:
        """See `Ticket`."""
        look = monotonic() + _ERROR_POLL
        while not self.done():
            now = monotonic()
            left = deadline - now
            if left <= 0:
                raise EngineTimeout("the device has not finished the sum in time")
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
    """Returns the current device of a type.

    Raises:
        ImportError: there is none, or torch was built without it.
    """
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        raise ImportError(f"torch {torch.__version__} finds no device of type {kind!r}")
    return torch.device(kind, module.current_device())
