"""Buckets of tensors on one device, and the transport that gives them to an engine.

    flat, on the device:  [ gradients, N ]                          the engine sums it
    tail, on the host:    [ weight, 1 | used, P | piggyback ]       links sum it, first

`Bucket` (`_parallel/_buckets.py`) explains the parts. Nothing here waits for the device: marks keep the order of
kernels (`_device_streams`), and the host waits only for the ticket of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from paceline._base.sum_order import Node, SumOrder
from paceline._base.work import Work
from paceline._group import Group
from paceline._parallel._parameter import Parameter
from paceline._parallel._transport import NO_FIXED_ORDER, GroupTransport
from paceline.engines import OnDevice
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.torch._device_parameter import DeviceParameter
from paceline.torch._device_streams import streams_of
from paceline.torch._tensors import Tensor, array_of, numpy_dtype, on_host

_NOT_ON_DEVICES = (
    "models on a device cannot do microbatches yet: train on the CPU and leave out --engine, or leave out the "
    "microbatches of the sampler"
)


class TensorBucket:
    """The gradients of some parameters of one dtype on one device; a `GradientBucket`.

    Attributes:
        flat: the elements that travel. On a device bfloat16 travels as it is, as with torch's DDP. Others in 16 bits
            travel as float32, since float16 times the number of samples may overflow, and engines for the CPU do not
            sum bfloat16; they lie in a tensor of their own.
        tail: everything else that travels.
    """

    def __init__(self, parameters: Mapping[str, Parameter], room: int) -> None:
        self._parameters = cast("Sequence[DeviceParameter]", tuple(parameters.values()))
        first = self._parameters[0].tensor
        self._device, self._dtype = first.device, first.dtype
        if odd := next((path for path, p in parameters.items() if p.tensor.device != self._device), ""):  # type: ignore[attr-defined]
            raise UnsupportedOp(f"parameter {odd!r} is not on {self._device}, where others of its bucket are")
        self._streams = streams_of(self._device)
        wide = torch.float32 if first.element_size() == 2 else self._dtype
        self._wire = self._dtype if self._dtype == torch.bfloat16 and not on_host(first) else wide
        self.tail: NDArray[Any] = np.zeros(1 + len(self._parameters) + room, numpy_dtype(wide))
        self._allocate()

    @property
    def nbytes(self) -> int:
        """See `GradientBucket`."""
        return int(self.flat.numel() * self.flat.element_size()) + self.tail.nbytes

    @property
    def divisible(self) -> bool:
        """True on the CPU. On a device the thread that trains divides, in the stream that then reads the means."""
        return bool(self._device.type == "cpu")

    @property
    def total(self) -> NDArray[Any]:
        """See `GradientBucket`."""
        return self.tail[:1]

    @property
    def piggyback(self) -> NDArray[Any]:
        """See `GradientBucket`."""
        return self.tail[1 + len(self._parameters) :]

    def payload(self, *, as_tensor: bool) -> Any:
        """Returns the gradients as an engine takes them: the packed tensor, or an array over its memory."""
        return OnDevice(self.flat, self._packed) if as_tensor else array_of(self.flat)

    def pack(self, weight: float, *, alone: bool) -> None:
        """See `GradientBucket`; enqueued in the calling thread's stream, behind all writes of the gradients."""
        del alone
        self.tail[0] = weight
        here = self._streams.current()
        waited = [here]  # a mark for each gradient would cost milliseconds in a step, and most models have one stream
        with torch.no_grad():
            for i, (parameter, slot) in enumerate(zip(self._parameters, self._slots, strict=True)):
                if parameter.written is not None and parameter.written not in waited:
                    self._streams.wait_for(self._streams.mark(parameter.written))
                    waited.append(parameter.written)
                parameter.written = None
                gradient = parameter.grad
                self.tail[1 + i] = gradient is not None
                if gradient is None:
                    slot.zero_()
                elif gradient is not slot:  # the user, or another wrapper, has moved it
                    slot.copy_(gradient)
                    parameter._hold(slot)
            if self._apart is not None:
                self.flat.copy_(self._apart)
        self._packed = self._streams.mark()

    def unpack(self, total: float, *, divided: bool) -> None:
        """See `Bucket.unpack`; enqueued in the calling thread's stream."""
        if not total > 0:
            raise StepOrderError("the weights of all ranks add up to 0, so there are no samples to average")
        with torch.no_grad():
            if total != 1 and not divided:  # a division by 1 changes no bit
                self.flat.div_(total)
            if self._apart is not None:
                self._apart.copy_(self.flat)
        for used, parameter, slot in zip(self.tail[1:].tolist(), self._parameters, self._slots, strict=False):
            parameter._hold(slot if used > 0 else None)

    def add_leaf(self, order: SumOrder) -> None:
        """Is never called: `TensorTransport` refuses trees."""
        raise AssertionError(f"{order.name} in a bucket of tensors")

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Empty: it holds no sums."""
        return ()

    def keep_nodes(self, nodes: Sequence[Node], *, spare: int) -> None:
        """Does nothing: there are none."""

    def vacate(self) -> None:
        """See `GradientBucket`."""
        for parameter in self._parameters:
            parameter._home = None

    def reclaim(self) -> None:
        """See `GradientBucket`."""
        for parameter, slot in zip(self._parameters, self._slots, strict=True):
            gradient, parameter._home = parameter.grad, slot
            if gradient is not None and gradient is not slot:
                with torch.no_grad():
                    slot.copy_(gradient)
                parameter._hold(slot)

    def renew(self) -> None:
        """Takes new memory. The old is kept by the ticket of the sum that uses it, until its mark has happened."""
        self.tail = np.zeros_like(self.tail)
        self._allocate()

    def commit(self) -> None:
        """Does nothing: no errors are kept for feedback."""

    def new_generation(self) -> None:
        """Does nothing: nothing depends on the other ranks."""

    def _allocate(self) -> None:
        sizes = [prod(parameter.shape) for parameter in self._parameters]
        self.flat: Tensor = torch.zeros(sum(sizes), dtype=self._wire, device=self._device)
        self._apart = None if self._wire == self._dtype else torch.zeros_like(self.flat, dtype=self._dtype)
        homes = self.flat if self._apart is None else self._apart
        parts = torch.split(homes, sizes)
        self._slots = [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)]
        self._packed = self._streams.mark()
        self.reclaim()


class TensorTransport(GroupTransport):
    """Keeps gradients in tensors, whose sums the group's engine carries; a `GradientTransport`."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._carrying = group
        self._on_device = False

    @property
    def tree_refusal(self) -> str:
        """See `GradientTransport`: an engine sums in an order of its own, and links do not carry a device's sums."""
        return _NOT_ON_DEVICES if self._on_device else NO_FIXED_ORDER

    def new_bucket(self, parameters: Mapping[str, Parameter], *, room: int) -> TensorBucket:
        """See `GradientTransport`."""
        bucket = TensorBucket(parameters, room)
        self._on_device = self._on_device or not on_host(bucket.flat)
        return bucket

    def start(
        self, bucket: TensorBucket, *, divisor: Callable[[], float] | None, in_background: bool
    ) -> Work[Any] | None:
        """See `GradientTransport`."""
        engine = self._carrying.open_engine()
        assert engine is not None, "this transport is for groups with an engine"
        kind = bucket.flat.device.type
        if kind not in engine.traits.devices:
            raise UnsupportedOp(
                f"the engine {engine.name!r} sums on {', '.join(sorted(engine.traits.devices))}, and the gradients are "
                f"on {kind}: name another engine, or move the module (docs/engines.md)"
            )
        if engine.device not in (None, bucket.flat.device):
            raise UnsupportedOp(
                f"the engine {engine.name!r} sums on {engine.device}, and the gradients are on {bucket.flat.device}: "
                f"call torch.{kind}.set_device({str(bucket.flat.device)!r}) before the first forward pass"
            )
        payload = bucket.payload(as_tensor=engine.traits.tensors)
        work = self._carrying.all_reduce_carried(payload, bucket.tail, divisor=divisor, async_op=in_background)
        return work if in_background else None

    def complete(self, bucket: TensorBucket) -> None:
        """Does nothing."""
