"""The transports of gradients that lie in tensors: to an engine, or through pinned memory to links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from numpy.typing import NDArray

from paceline._base.work import Work
from paceline._parallel._low_rank import shrinks
from paceline._parallel._parameter import Parameter
from paceline._parallel._transport import EngineTransport, HostTransport
from paceline.compression import Bf16
from paceline.engines import DataEngine
from paceline.errors import UnsupportedOp
from paceline.torch._device_parameter import DeviceParameter
from paceline.torch._low_rank_tensors import LowRankTensorBucket
from paceline.torch._pinned import PinnedMemory, pinned_memory
from paceline.torch._tensor_buckets import Crossing, TensorBucket, TensorMemory
from paceline.torch._tensors import Tensor, on_host


def check_place(engine: DataEngine, device: Any) -> None:
    """Checks that an engine sums gradients on a device; raises UnsupportedOp."""
    if device.type not in engine.traits.devices:
        raise UnsupportedOp(
            f"the engine {engine.name!r} sums on {', '.join(sorted(engine.traits.devices))}, and the gradients are "
            f"on {device.type}: name another engine, or move the module (docs/engines.md)"
        )
    if engine.device not in (None, device):
        raise UnsupportedOp(
            f"the engine {engine.name!r} sums on {engine.device}, and the gradients are on {device}: "
            f"call torch.{device.type}.set_device({str(device)!r}) before the first forward pass"
        )


class TensorTransport(EngineTransport):
    """Keeps gradients in tensors, whose sums the group's engine carries; a `GradientTransport`."""

    def new_bucket(self, parameters: Mapping[str, Parameter], *, room: int) -> Any:
        """See `GradientTransport`. On a device the thread that trains divides, in the stream that reads the means."""
        on_cpu = on_host(next(iter(parameters.values())).tensor)  # type: ignore[attr-defined]
        return TensorBucket(parameters, room, divisible=on_cpu, as_is=not on_cpu)

    def start(self, bucket: Any, *, divisor: Callable[[], float] | None, in_background: bool) -> Work[Any] | None:
        """See `GradientTransport`."""
        engine = self._carrying._core.open_engine()
        assert engine is not None, "this transport is for groups with an engine"
        check_place(engine, bucket.flat.device)
        payload = bucket.payload(as_tensor=engine.traits.tensors)
        work: Work[Any] = self._carrying._core.all_reduce_carried(
            payload, bucket.tail, divisor=divisor, async_op=in_background
        )
        return work if in_background else None


class DeviceTransport(HostTransport):
    """Moves gradients over links: from the CPU as a `HostTransport`, and from a device through pinned memory.

    The arguments are as in `HostTransport`.
    """

    _first: tuple[str, Any] = "", None
    """The path and the device of the first parameter."""

    def new_bucket(self, parameters: Mapping[str, Parameter], *, room: int) -> Any:
        """See `GradientTransport`."""
        for path, parameter in parameters.items():
            device = parameter.tensor.device  # type: ignore[attr-defined]
            self._first = self._first if self._first[0] else (path, device)
            if device != self._first[1]:
                raise UnsupportedOp(
                    f"parameter {path!r} is on {device}, and {self._first[0]!r} on {self._first[1]}: move all trained "
                    "parameters to one device"
                )
        if not any(isinstance(parameter, DeviceParameter) for parameter in parameters.values()):
            return super().new_bucket(parameters, room=room)
        if self._low_rank and any(shrinks(parameter, self._low_rank) for parameter in parameters.values()):
            return LowRankTensorBucket(parameters, self._low_rank, room, feedback=self._feedback)
        narrow = next(iter(parameters.values())).dtype.name == "bfloat16"
        codec = Bf16() if self._codec is None and narrow else self._codec
        feedback = self._feedback and not self._low_rank
        return TensorBucket(parameters, room, divisible=codec is None, codec=codec, feedback=feedback)

    def start(self, bucket: Any, *, divisor: Callable[[], float] | None, in_background: bool) -> Work[Any] | None:
        """See `GradientTransport`: a bucket on a device is always summed in the background."""
        if not isinstance(bucket, TensorBucket):
            return super().start(bucket, divisor=divisor, in_background=in_background)

        outgoing, home = bucket.outgoing, bucket._in_use
        memory, pinned = self._lend(bucket, home, len(outgoing))
        work: Work[Any]
        try:
            with self._crossing(bucket, Crossing(bucket.streams, outgoing, home, pinned, bucket.change)) as arrays:
                work = self._sum(bucket, arrays, arrays[-1], divisor, in_background=True)
            work.on_done(partial(memory.take_back, pinned))
        except BaseException:
            memory.take_back(pinned)
            raise
        return work

    def complete(self, bucket: Any) -> None:
        """Runs the second reduction of a bucket that has one."""
        if not isinstance(bucket, TensorBucket):
            super().complete(bucket)
        elif isinstance(bucket, LowRankTensorBucket) and bucket.compresses:
            second = bucket.second()
            memory, pinned = self._lend(bucket, second, 1)
            try:
                with self._crossing(bucket, Crossing(bucket.streams, [second], second, pinned)) as (array,):
                    self._group.all_reduce(array, out=array)
            finally:
                memory.take_back(pinned)

    def _lend(self, bucket: TensorBucket, home: TensorMemory, times: int) -> tuple[PinnedMemory, Tensor]:
        """Lends pinned memory that has room so many times for what is in some memory of a bucket."""
        memory, size = pinned_memory(self._group), home.flat.numel() + home.tail.size
        return memory, memory.lend(size * times, home.flat.dtype, bucket.device, self._group._core.mesh.fault.check)

    @contextmanager
    def _crossing(self, bucket: TensorBucket, crossing: Crossing) -> Iterator[Sequence[NDArray[Any]]]:
        """Has the operation that is issued inside sum what crosses; yields its arrays."""
        bucket.crossing = crossing
        with self._group._core.surrounded(partial(crossing.around, self._group._core.mesh.fault.check)):
            yield crossing.arrays
