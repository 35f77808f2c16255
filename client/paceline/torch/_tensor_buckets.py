"""Buckets of tensors on one device, and their way to links and back.

    flat, on the device:  [ gradients, N ]
    tail, on the host:    [ weight, 1 | used, P | piggyback ]

`Bucket` (`_parallel/_buckets.py`) explains the parts. An engine sums `flat` on the device, after links have summed the
tail. Links sum both in one array, laid out as a `Bucket` of the CPU, so that all they know of those (divisors, codecs,
trees) serves here: `flat` is copied to pinned memory, summed there by the group's thread, and copied back. While one
bucket is summed the next one is copied, because each of these has its own stream.

While the backward pass runs, nothing on its thread waits for the device: marks keep the order of kernels
(`_device_streams`). At its end the host waits until all sums are there, and not for the copies back. The second sums of
`PowerSGD` follow then, one bucket after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from paceline._parallel._node_sums import NodeSums
from paceline._parallel._parameter import Parameter
from paceline.compression import Codec, Memory
from paceline.engines import OnDevice
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.torch._device_parameter import DeviceParameter
from paceline.torch._device_streams import TO_DEVICE, TO_HOST, DeviceStreams, Mark, await_mark, streams_of
from paceline.torch._tensors import Tensor, array_of, numpy_dtype


class TensorMemory(NamedTuple):
    """Memory of a bucket."""

    flat: Tensor
    """The elements that travel."""
    tail: NDArray[Any]
    """Everything else that travels."""
    slots: Sequence[Tensor]
    """The home of each parameter's gradient."""


class Crossing:
    """One way of a bucket to pinned memory, over links, and back. The copies to pinned memory begin here.

    Args:
        streams: the device's streams.
        outgoing: what is copied to pinned memory.
        home: where the sum is copied to.
        pinned: memory for all of `outgoing`.
        change: changes the summed elements on the host, before they are copied home.

    Attributes:
        arrays: the pinned memory, an array for each of the outgoing ones; the last one gets the sum. Empty afterwards.
        back: the mark behind the copy of the sum to the device; None before it.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        outgoing: Sequence[TensorMemory],
        home: TensorMemory,
        pinned: Tensor,
        change: Callable[[NDArray[Any]], None] = lambda sums: None,
    ) -> None:
        self.back: Mark | None = None
        self._change = change
        self._streams = streams
        self._outgoing = outgoing
        self._home = home
        self._count = count = home.flat.numel()
        self._pinned = pinned.split(count + home.tail.size)
        self.arrays = [array_of(part) for part in self._pinned]
        written = streams.mark()
        with streams.aside(TO_HOST):
            streams.wait_for(written)
            for memory, part in zip(outgoing, self._pinned, strict=True):
                streams.copy(part[:count], memory.flat)
            self._there = streams.mark()
        for memory, array in zip(outgoing, self.arrays, strict=True):
            array[count:] = memory.tail

    def around(self, check: Callable[[], None], run: Callable[[], Any], deadline: float) -> None:
        """Runs the sum once the device has written the pinned memory, and sends the result home; in a group's thread.

        Returns nothing, because the sum lies in memory that others get.

        Args:
            check: raises if the generation has failed.
            run: runs the sum.
            deadline: a `time.monotonic()` value.
        """
        try:
            with self._streams.here():
                await_mark(self._there, check, deadline)
                run()
                self._change(self.arrays[-1][: self._count])
                home = self._home
                home.tail[...] = self.arrays[-1][self._count :]
                with self._streams.aside(TO_DEVICE):
                    self._streams.copy(home.flat, self._pinned[-1][: self._count])
                    self._streams.keep(home.flat)
                    self.back = self._streams.mark()
        finally:
            self._outgoing, self._pinned, self.arrays = (), (), []


class TensorBucket(NodeSums[TensorMemory]):
    """The gradients of some parameters of one dtype on one device; a `GradientBucket`.

    Those in 16 bits travel as float32, since float16 times the number of samples may overflow, and engines for the CPU
    do not sum bfloat16; they lie in a tensor of their own. With `as_is` bfloat16 travels as it is, as with torch's DDP.

    Args:
        parameters: see `Bucket`.
        room: see `Bucket`.
        divisible: see `GradientBucket`.
        as_is: see above.
        codec: compresses `flat` on its way over links; None for no compression.
        feedback: see `Memory`.
        travels: number of elements of `flat`, if a subclass fills it; None for all gradients.

    Attributes:
        codec: see above.
        exact: see `Bucket`.
        divisible: see above.
        memory: see `Bucket`.
        crossing: the last way over links; None if there was none, or an engine carries the sums.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        room: int,
        *,
        divisible: bool,
        as_is: bool = False,
        codec: Codec | None = None,
        feedback: bool = False,
        travels: int | None = None,
    ) -> None:
        super().__init__()
        self._parameters = cast("Sequence[DeviceParameter]", tuple(parameters.values()))
        first = self._parameters[0].tensor
        self.device, self._dtype = first.device, first.dtype
        if odd := next((path for path, p in parameters.items() if p.tensor.device != self.device), ""):  # type: ignore[attr-defined]
            raise UnsupportedOp(f"parameter {odd!r} is not on {self.device}, where others of its bucket are")
        self.streams: DeviceStreams = streams_of(self.device)
        wide = torch.float32 if first.element_size() == 2 else self._dtype
        self._wire = self._dtype if as_is and self._dtype == torch.bfloat16 else wide
        self._tail_dtype = numpy_dtype(wide)
        self.exact = 1 + len(self._parameters) + room
        self._count = sum(prod(parameter.shape) for parameter in self._parameters)
        self._travels = travels
        self.divisible = divisible
        self.codec = codec
        self.memory = Memory(feedback=feedback)
        self.crossing: Crossing | None = None
        self._allocate()

    @property
    def flat(self) -> Tensor:
        """See `TensorMemory`."""
        return self._in_use.flat

    @property
    def tail(self) -> NDArray[Any]:
        """See `TensorMemory`."""
        return self._in_use.tail

    @property
    def nbytes(self) -> int:
        """See `GradientBucket`."""
        return int(self.flat.numel() * self.flat.element_size()) + self.tail.nbytes

    @property
    def total(self) -> NDArray[Any]:
        """See `GradientBucket`."""
        return self.tail[:1]

    @property
    def piggyback(self) -> NDArray[Any]:
        """See `GradientBucket`."""
        return self.tail[1 + len(self._parameters) :]

    @property
    def outgoing(self) -> Sequence[TensorMemory]:
        """The memory that this rank adds to the sum; the sum comes back to the memory in use."""
        return self.terms if self.order.leaves else [self._in_use]

    def payload(self, *, as_tensor: bool) -> Any:
        """Returns the gradients as an engine takes them: the packed tensor, or an array over its memory."""
        return OnDevice(self.flat, self._packed) if as_tensor else array_of(self.flat)

    def pack(self, weight: float, *, alone: bool) -> None:
        """See `GradientBucket`; enqueued in the calling thread's stream, behind all writes of the gradients."""
        self.tail[0] = weight
        here = self.streams.current()
        waited = [here]  # a mark for each gradient would cost milliseconds in a step, and most models have one stream
        with torch.no_grad():
            for i, (parameter, slot) in enumerate(zip(self._parameters, self._in_use.slots, strict=True)):
                if parameter.written is not None and parameter.written not in waited:
                    self.streams.wait_for(self.streams.mark(parameter.written))
                    waited.append(parameter.written)
                parameter.written = None
                self.tail[1 + i] = parameter._pack(slot, weight)
            self._encode(alone=alone)
        self._packed = self.streams.mark()

    def unpack(self, total: float, *, divided: bool) -> None:
        """See `Bucket.unpack`; enqueued in the calling thread's stream."""
        if not total > 0:
            raise StepOrderError("the weights of all ranks add up to 0, so there are no samples to average")
        self._await_crossing()
        with torch.no_grad():
            self._decode(total, divided=divided)
        for used, parameter, slot in zip(self.tail[1:].tolist(), self._parameters, self._in_use.slots, strict=False):
            parameter._hold(slot if used > 0 else None)

    def change(self, sums: NDArray[Any]) -> None:
        """Changes the sums on the host, before they are copied to the device; this class does nothing."""

    def _encode(self, *, alone: bool) -> None:
        """Fills `flat` from the complete gradients."""
        del alone
        if self._apart is not None:
            self.flat.copy_(self._apart)

    def _decode(self, total: float, *, divided: bool) -> None:
        """Writes the means to the homes of the gradients."""
        if total != 1 and not divided:  # a division by 1 changes no bit
            self.flat.div_(self._divisor(total))
        if self._apart is not None:
            self._apart.copy_(self.flat)

    def _divisor(self, total: float) -> Any:
        """Returns a number as a tensor: a device multiplies by the reciprocal of a number, which has other bits."""
        return torch.full((), total, dtype=self._wire, device=self.device) if self._wire.itemsize > 2 else total

    def vacate(self) -> None:
        """See `GradientBucket`."""
        for parameter in self._parameters:
            parameter._home = None

    def reclaim(self) -> None:
        """See `GradientBucket`."""
        self._await_crossing()
        self.memory.undo()
        self._take_home()

    def renew(self) -> None:
        """Takes new memory. The old is kept by the sum that uses it until that is over."""
        self._forget_sums()
        self.memory, self.crossing = self.memory.successor(), None
        self._allocate()

    def commit(self) -> None:
        """See `GradientBucket`."""
        self.memory.commit()

    def new_generation(self) -> None:
        """Does nothing: nothing depends on the other ranks."""

    def _await_crossing(self) -> None:
        if self.crossing is not None:
            self.streams.wait_for(self.crossing.back)

    def _allocate(self) -> None:
        apart = self._wire != self._dtype or self._travels is not None
        self._apart = torch.zeros(self._count, dtype=self._dtype, device=self.device) if apart else None
        self._use(self._new_memory())
        self._packed = self.streams.mark()
        self._take_home()

    def _new_memory(self) -> TensorMemory:
        sizes = [prod(parameter.shape) for parameter in self._parameters]
        count = self._count if self._travels is None else self._travels
        flat = torch.zeros(count, dtype=self._wire, device=self.device)
        parts = torch.split(flat if self._apart is None else self._apart, sizes)
        slots = [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)]
        return TensorMemory(flat, np.zeros(self.exact, self._tail_dtype), slots)

    def _use(self, memory: TensorMemory) -> None:
        self._in_use = memory

    def _take_home(self) -> None:
        """Makes the memory in use the home of the gradients, and moves existing ones here."""
        for parameter, slot in zip(self._parameters, self._in_use.slots, strict=True):
            gradient, parameter._home = parameter.grad, slot
            if gradient is not None and gradient is not slot:
                with torch.no_grad():
                    slot.copy_(gradient)
                parameter._hold(slot)

    def _offer_home(self) -> None:
        for parameter, slot in zip(self._parameters, self._in_use.slots, strict=True):
            parameter._home = slot

    def _add_up(self, left: TensorMemory, right: TensorMemory, into: TensorMemory) -> None:
        torch.add(left.flat, right.flat, out=into.flat)
        np.add(left.tail, right.tail, out=into.tail)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter._hold(None)

    def _clear_piggyback(self, memory: TensorMemory) -> None:
        memory.tail[1 + len(self._parameters) :] = 0
