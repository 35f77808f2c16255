"""The order of work on a device: which stream waits for which, without the host.

Three kinds of work touch a bucket, each perhaps on a stream of its own: kernels of the backward pass write gradients,
they are summed, and kernels of the optimizer read the means. The rules:

1. The stream that sums, or copies to the host, waits for the mark behind the last write.
2. What reads or overwrites the bucket waits for the mark behind the sum, or behind the copy back. For an engine the
   host waits (`Ticket`), because the next generation may not share its communicator.
3. The memory of a bucket is not given back before that mark has happened, even if the sum was aborted.
4. The host reads memory that a device writes only when the mark behind the copy has happened.

docs/how-to/devices.md says what has run on a GPU. Tests keep these rules with fakes, whose marks happen late
(`tests/pytorch/fake_device.py`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import monotonic, sleep
from typing import Any

import torch

from paceline.errors import OperationTimeout, UnsupportedOp
from paceline.torch._tensors import Tensor

TO_HOST, TO_DEVICE = "to the host", "to the device"
"""The uses of the streams that Paceline has for copies. Each engine has a stream of its own for sums (`new`)."""

_POLL = 0.0002
"""Seconds between two looks at a mark: a look is a call into the driver, and a copy takes longer."""


class Mark:
    """A point in the work of a stream, where an event of CUDA or XPU was recorded.

    Args:
        event: the event.
        device: the device, for errors.
    """

    def __init__(self, event: Any, device: str) -> None:
        self.event = event
        self._device = device

    def happened(self) -> bool:
        """Returns True once all work in front of it is over; RuntimeError if the device has failed."""
        with _naming(self._device):
            return bool(self.event.query())


@contextmanager
def _naming(device: str) -> Iterator[None]:
    """Adds the device to errors of its driver.

    Those stay, and after one the device runs nothing any more. Only the error that CUDA raises while another thread
    records a graph does not (docs/how-to/devices.md).
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{device} has failed: {str(error).splitlines()[0][:500]}") from error


def await_mark(mark: Mark | None, check: Callable[[], None], deadline: float) -> None:
    """Waits on the host until a mark has happened.

    Raises:
        OperationTimeout: the deadline, a `time.monotonic()` value, passes first.
        Exception: `check` raised it, because the generation has failed; or the device has failed.
    """
    while mark is not None and not mark.happened():
        check()
        if monotonic() > deadline:
            raise OperationTimeout("the device has not finished the gradients in time")
        sleep(_POLL)


class DeviceStreams(abc.ABC):
    """The streams of one device."""

    @abc.abstractmethod
    def mark(self, stream: Any = None) -> Mark | None:
        """Marks a stream, by default the calling thread's; returns None if work is done when it is called."""

    @abc.abstractmethod
    def current(self) -> Any:
        """Returns something that tells this stream from others."""

    @abc.abstractmethod
    def captures(self) -> bool:
        """Returns True while the calling thread's stream is being recorded for a CUDA graph, and runs nothing."""

    @abc.abstractmethod
    def wait_for(self, mark: Mark | None) -> None:
        """Has the calling thread's stream wait for a mark; the host goes on."""

    @abc.abstractmethod
    def here(self) -> Any:
        """Returns a context manager, inside of which the device is the calling thread's current one."""

    @abc.abstractmethod
    def new(self) -> Any:
        """Returns another stream."""

    @abc.abstractmethod
    def aside(self, use: Any) -> Any:
        """Returns a context manager, inside of which this thread's work goes to a stream.

        `use` belongs to a stream for copies, or is what `new` has returned.
        """

    @abc.abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies a tensor in the calling thread's stream; of the two, the one on the host is pinned."""

    @abc.abstractmethod
    def keep(self, tensor: Tensor) -> None:
        """Keeps the memory of a tensor, once nobody refers to it, until the calling thread's stream has used it."""


class HostStreams(DeviceStreams):
    """The CPU: work is done when it is called, so nothing waits."""

    def mark(self, stream: Any = None) -> None:
        """See `DeviceStreams`."""

    def current(self) -> Any:
        """See `DeviceStreams`."""
        return None

    def captures(self) -> bool:
        """See `DeviceStreams`."""
        return False

    def wait_for(self, mark: Mark | None) -> None:
        """See `DeviceStreams`."""

    def here(self) -> Any:
        """See `DeviceStreams`."""
        return nullcontext()

    def new(self) -> None:
        """See `DeviceStreams`."""

    def aside(self, use: Any) -> Any:
        """See `DeviceStreams`."""
        del use
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `DeviceStreams`."""
        target.copy_(source)

    def keep(self, tensor: Tensor) -> None:
        """See `DeviceStreams`."""


class CudaStreams(DeviceStreams):
    """The streams of a device, given with its number, whose module in torch is like `torch.cuda`."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._title = _title(device, self._module.get_device_properties(device))
        self._copies = {use: self.new() for use in (TO_HOST, TO_DEVICE)}

    def mark(self, stream: Any = None) -> Mark:
        """See `DeviceStreams`."""
        with _naming(self._title):
            event = self._module.Event()
            event.record(self._module.current_stream(self._device) if stream is None else stream)
        return Mark(event, self._title)

    def current(self) -> Any:
        """See `DeviceStreams`."""
        return self._module.current_stream(self._device)

    def captures(self) -> bool:
        """See `DeviceStreams`."""
        return self._device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())

    def wait_for(self, mark: Mark | None) -> None:
        """See `DeviceStreams`."""
        if mark is not None:
            self._module.current_stream(self._device).wait_event(mark.event)

    def here(self) -> Any:
        """See `DeviceStreams`."""
        return self._module.device(self._device)

    def new(self) -> Any:
        """See `DeviceStreams`."""
        return self._module.Stream(self._device)

    def aside(self, use: Any) -> Any:
        """See `DeviceStreams`."""
        return self._module.stream(self._copies[use] if isinstance(use, str) else use)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `DeviceStreams`."""
        target.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor) -> None:
        """See `DeviceStreams`."""
        tensor.record_stream(self._module.current_stream(self._device))


def _title(device: Any, properties: Any) -> str:
    """Returns a name with which the card is found on its host, whatever `CUDA_VISIBLE_DEVICES` leaves visible here."""
    return f"{device} ({properties.name}, {getattr(properties, 'uuid', 'no UUID')})"


_streams: dict[Any, DeviceStreams] = {torch.device("cpu"): HostStreams()}


def streams_of(device: Any) -> DeviceStreams:
    """Returns the streams of a device."""
    if device not in _streams:
        if device.type not in ("cuda", "xpu"):
            raise UnsupportedOp(f"Paceline does not train on {device}: the devices are cpu, cuda and xpu")
        _streams[device] = CudaStreams(device)
    return _streams[device]
