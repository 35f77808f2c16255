"""How gradients leave a replica: hooks behind torch's own parallelism, which drive the core of DDP.

Ranks with the same position in their replicas (a *lane*) hold the same local tensors, and average their gradients over
the group. A hook on each parameter is called when torch has done with its gradient inside the replica: autograd calls
it for plain and tensor-parallel parameters, and FSDP2 for its shards, once they are reduced and cast.

Nothing is called before a gradient is stored. So it stays where torch has put it, also while passes accumulate, and
is multiplied by the replica's weight when its bucket is packed, which copies it.

A mate whose own reductions succeed goes on to torch's collectives, and would hang there without this rank. So in a step
that can be undone, a failed reduction does not raise in the backward pass: it goes on, with this rank's gradients, and
the step's gate raises on all mates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from paceline._base.sum_order import EVEN, SumOrder
from paceline._elastic.foreign import local_of, placed_like
from paceline._group import Group
from paceline._parallel._accumulation import Accumulation
from paceline._parallel._synchronizer import GradientSynchronizer
from paceline.errors import PacelineError, StepOrderError
from paceline.torch._autograd import HANDLES, AutogradDriver, Callback, TorchModule, TorchParameter, weakly
from paceline.torch._device_parameter import DeviceParameter
from paceline.torch._tensor_transports import DeviceTransport, TensorTransport
from paceline.torch._tensors import Tensor, on_host, tensor_of


class _OfReplica(TorchParameter):
    """A mixin: the parameter may be a DTensor, of which the ranks of a replica have parts."""

    __slots__ = ()

    def _local(self, tensor: Tensor) -> Tensor:
        return local_of(tensor)

    def _placed(self, local: Tensor) -> Tensor:
        return placed_like(local, self.tensor)

    def _pack(self, slot: Any, weight: float) -> bool:
        gradient = self.tensor.grad
        if gradient is None or not weight:  # without a sample it may be NaN
            slot[...] = 0
            return False
        out = tensor_of(slot) if isinstance(slot, np.ndarray) else slot
        with torch.no_grad():
            torch.mul(local_of(gradient), weight, out=out)  # a weight is not rounded to 16 bits
        self._hold(slot)
        return True

    def listen(self, observer: AutogradDriver) -> None:
        """Calls the observer for every gradient from now on; does nothing if the parameter is frozen."""
        if self._handles or not self.requires_grad:
            return
        for handle in HANDLES.get(self.tensor, ()):  # the new call of `replicate` replaces an earlier one
            handle.remove()
        self._autograd_observer = observer
        self._handles = (self.tensor.register_post_accumulate_grad_hook(weakly(self._after)),)
        HANDLES[self.tensor] = self._handles

    def _after(self, tensor: Tensor) -> None:
        if getattr(tensor.grad, "placements", None) != getattr(tensor, "placements", None):
            # Tensor parallelism may leave a partial sum. All mates are here, whatever has failed.
            with torch.no_grad():
                tensor.grad = tensor.grad.redistribute(placements=tensor.placements)
        self.writes += 1
        self._has_written()
        self._autograd_observer.after(self)


class LaneParameter(_OfReplica):
    """The local tensor of a parameter on the CPU; `tensor` is the parameter."""

    __slots__ = ()


class DeviceLaneParameter(_OfReplica, DeviceParameter):
    """The local tensor of a parameter on a device, or of one whose gradients an engine sums as tensors."""

    __slots__ = ()

    def _pack(self, slot: Any, weight: float) -> bool:
        if (gradient := self.tensor.grad) is not None:
            self._streams.keep(local_of(gradient))  # FSDP2 has computed it in a stream of its own
        return super()._pack(slot, weight)


def reshard(module: Any) -> None:
    """Has FSDP2 drop what a forward pass without a backward one has gathered: it is old once shards are written."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def _lane_parameter(tensor: Tensor, *, carried: bool) -> TorchParameter:
    as_array = on_host(local_of(tensor)) and not carried
    return LaneParameter(tensor) if as_array else DeviceLaneParameter(tensor)


def _offloads(module: Any) -> bool:
    """Returns True if FSDP2 has parameters of a module on the host that computes on a device."""
    in_use = any(kind.is_initialized() for kind in (torch.cuda, torch.xpu))
    sharded = any(isinstance(each, FSDPModule) for each in module.modules())
    return in_use and sharded and any(on_host(local_of(tensor)) for tensor in module.parameters())


class LaneModule(TorchModule):
    """A module with the parameters that it had when `replicate` was called: FSDP2 shows others while it runs."""

    def __init__(self, module: Any, *, carried: bool) -> None:
        super().__init__(module, partial(_lane_parameter, carried=carried))
        self._listed = list(super().named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, TorchParameter]]:
        """Yields pairs of path and parameter, always the same objects."""
        yield from self._listed


class LaneAccumulation(Accumulation):
    """An accumulation whose passes add up where torch stores gradients, and whose weight is applied at the end."""

    def __init__(self, parameters: Any, sources: Any) -> None:
        super().__init__(parameters, sources, adds_up=True)

    def add(self, weight: float, *, alone: bool) -> float:
        """See `Accumulation`. In a world of one all passes have equal weight, as without `replicate`."""
        return super().add(float(weight > 0) if alone else weight, alone=False)

    def open(self) -> None:
        """Does nothing: torch adds to the gradients that are there."""

    def drop_if_cleared(self) -> None:
        """Does nothing: all passes of a step have one weight, so those that were cleared change no mean."""

    def written_by_others(self, *, or_zeros: bool) -> str | None:
        """Returns None: gradients that users have written are used as they are, as in torch."""
        del or_zeros
        return None


def _give(gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, gradient in gradients:
        tensor.grad = gradient


class LaneSynchronizer(GradientSynchronizer):
    """A synchronizer that leaves this rank's own gradients after a failure.

    Mates without a failure have theirs, and what the script calls next, such as clipping, must take the same way here.
    """

    def abandon(self) -> None:
        """See `GradientSynchronizer`."""
        parameters: Mapping[str, Any] = {} if self.reducer is None else self.reducer.parameters
        tensors = [parameter.tensor for parameter in parameters.values()]
        kept = [None if tensor.grad is None else tensor.grad.detach().clone() for tensor in tensors]
        super().abandon()
        for tensor, gradient in zip(tensors, kept, strict=True):
            tensor.grad = gradient


class LaneDriver(AutogradDriver):
    """Drives the synchronizer of one replica from the hooks of its parameters.

    Attributes:
        failed: the reductions of this attempt at a step have failed; the step's gate says so.
    """

    def __init__(self, module: Any, group: Group, **settings: Any) -> None:
        super().__init__(
            LaneModule(module, carried=group._core.engine_name != "links"),
            group,
            accumulation=LaneAccumulation,
            synchronizer=LaneSynchronizer,
            carried=TensorTransport,
            over_links=DeviceTransport,
            **settings,
        )
        self.failed = False
        self._stepwise = False
        self._gathered: SumOrder = EVEN
        """The last microbatch in which passes were accumulated."""
        offloads = _offloads(module)
        # torch's DDP puts its sums into the gradients at the end of the pass, behind all hooks; and FSDP2 waits there
        # for gradients on their way to pinned memory.
        self._late = offloads or any(
            isinstance(each, torch.nn.parallel.DistributedDataParallel) for each in module.modules()
        )
        self._is_late = False
        self._on_device = offloads  # autograd runs in the device's thread
        self._listen()  # before the first agreement: no gradient may pass unseen
        if any(True for _ in module.buffers()):  # they are set for each microbatch
            module.register_forward_pre_hook(lambda *_: self.synchronizer.begin_forward())

    def begin_step(self) -> None:
        """Begins a step that may be undone."""
        self.failed, self._stepwise = False, True
        self.model.begin_step()

    def end_step(self) -> None:
        """Ends the block of a step: failures raise from now on."""
        self.failed = self._stepwise = False

    def drop_gradients(self) -> None:
        """See `AutogradDriver`."""
        self.failed = False
        super().drop_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets passes in the block accumulate until the next one outside, in a microbatch until `reduce`."""
        order = self._group._core.order
        if order is not self._gathered:
            self._gathered = order
            order.check_without_gradients(self.module.named_parameters())
        with self.synchronizer.no_sync():
            yield

    def reduce(self) -> None:
        """Reduces the gradients that are there, which passes in `no_sync` have left."""
        if self.failed:
            return
        gathered: list[tuple[Tensor, Tensor]] = []
        if self._group._core.order.is_leaf:  # for the core they are one pass, which begins without gradients
            gathered = [(p.tensor, p.tensor.grad) for _, p in self.module.named_parameters()]
        _give([(tensor, None) for tensor, _ in gathered])
        try:
            with self.synchronizer.backward_pass(self._next_weight(), reduces=True):
                _give(gathered)
        except PacelineError as error:
            _give(gathered)
            self._fail(error)

    def after(self, parameter: TorchParameter) -> None:
        """See `AutogradDriver`."""
        if self.failed or (self._group._core.order.is_leaf and not self.synchronizer.reduces):
            return  # the gate reports a failure; and in `no_sync` torch adds up the passes of the microbatch
        try:
            if self._pass is not None and self._pass.is_dead:
                self._abandon(StepOrderError("the last backward pass did not finish"))
            if self._pass is None:
                fresh, parameter.tensor.grad = parameter.tensor.grad, None  # a pass begins without it
                try:
                    self.before(parameter)
                finally:
                    parameter.tensor.grad = fresh
            else:
                self.before(parameter)
            if not self._late:
                super().after(parameter)
        except PacelineError as error:
            self._fail(error)

    def _end(self) -> None:
        if self._late and not self._is_late:
            self._is_late = True
            torch.autograd.Variable._execution_engine.queue_callback(Callback(self._end))
            return
        self._is_late = False
        try:
            super()._end()
        except PacelineError as error:
            self._fail(error)

    def _close(self, error: BaseException) -> None:
        self._is_late = False
        super()._close(error)

    def _fail(self, error: PacelineError) -> None:
        """Leaves a failure of the generation to the gate; raises any other error, and all outside of steps."""
        if not (self._stepwise and self._group._core.mesh.fault.failed):
            raise error
        self.failed = True
