"""How autograd drives a sharded model: calls run units forward, and hooks run them backward.

The backward run of a unit begins when autograd has the gradient of one of its outputs, and ends when it has the
inputs' gradients. By then it has the parameters' too: of the operations that are ready, autograd always runs the one
that came last in the forward pass, and gradients of parameters before all others. Both moments depend on how the units
are connected, not on which of their parameters a rank has used, so all ranks reach them in the same order.

Between the passes of its unit a parameter has no memory, and in the backward pass its memory is another than before. An
operation that saves a weight, or a view of it such as `weight.t()`, would keep the whole array alive. torch's own FSDP
frees and refills the storage that saved tensors refer to, with `untyped_storage().resize_`. That is impossible here:
the memory is NumPy's, so that links read it without a copy, and storage made by `torch.from_numpy`, or ever exposed by
`Tensor.numpy()`, has a fixed size. So `saving` replaces a saved tensor that lies in a parameter by its place there, and
when the backward pass asks for it, makes it again from the memory that the parameter has then. That memory is
reference-counted, so freed memory is never read.

Only one pair of such hooks is active at a time, the innermost. Ours are the outermost of the model: inside of
activation checkpointing its own hooks are active, which keep values only while they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from paceline._group import Group
from paceline._parallel._accumulation import Accumulation
from paceline._parallel.sharding._placement import ShardingStrategy
from paceline._parallel.sharding._runner import UnitRunner
from paceline._parallel.sharding._sharded_model import ShardedModel
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.torch._autograd import AutogradPass
from paceline.torch._device_streams import streams_of
from paceline.torch._engine_flat_transport import transport_of
from paceline.torch._sharded_tensors import Adapter, Mirror, ModuleCall, mapped, mirror_in, tensors_in


class UnitRuns:
    """A backward pass of the whole model, and the running units in it."""

    def __init__(self, whole: AutogradPass) -> None:
        self.whole = whole
        self._inside: dict[int, list[ExitStack]] = {}
        """Runs in progress, by the identity of the sharded model that owns the unit."""

    def enter(self, sharded: ShardedModel) -> None:
        """Begins a run of a model's own unit."""
        run = ExitStack()
        run.enter_context(sharded.running_backward())
        self._inside.setdefault(id(sharded), []).append(run)

    def leave(self, sharded: ShardedModel) -> None:
        """Ends a run of a model's own unit; it does not matter which of several."""
        if self._inside.get(id(sharded)):
            self._inside[id(sharded)].pop().close()

    def end(self) -> None:
        """Ends all runs, including those of units whose inputs take no gradient, and the pass."""
        for runs in self._inside.values():
            while runs:
                runs.pop().close()
        self.whole.close()

    def abandon(self) -> None:
        """Ends the pass, which has failed, and drops its gradients."""
        error = StepOrderError("the backward pass did not finish")
        for run in [run for runs in self._inside.values() for run in runs]:
            with suppress(StepOrderError):
                run.__exit__(type(error), error, None)
        with suppress(StepOrderError):
            self.whole.abandon(error)


class UnitRun:
    """One forward run of a unit, and its backward run, which calls `enter` when it begins and `leave` when it ends."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter = enter
        self._leave = leave
        self._inputs = self._awaited = 0
        self._is_entered = False

    def of_inputs(self, call: ModuleCall) -> ModuleCall:
        """Returns inputs to call the unit with; their gradients show when the backward run ends."""
        args, kwargs = mapped((call.args, call.kwargs), self._watch_input)
        return ModuleCall(args, kwargs)

    def of_outputs(self, outputs: Any) -> Any:
        """Registers hooks on the unit's outputs; their gradients show when the backward run begins."""
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._begin)
        return outputs

    def _watch_input(self, tensor: Any) -> Any:
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        self._inputs += 1
        alias = tensor.view_as(tensor)  # its gradient comes only from this run, even if others use the tensor
        alias.register_hook(self._end)
        return alias

    def _begin(self, gradient: Any) -> None:
        del gradient
        if not self._is_entered:
            self._is_entered = True
            self._awaited = self._inputs
            self._enter()

    def _end(self, gradient: Any) -> None:
        del gradient
        self._awaited -= 1
        if self._is_entered and not self._awaited:
            self._is_entered = False
            self._leave()


class _SavedPlace(NamedTuple):
    """A saved view of a parameter."""

    mirror: Mirror
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements between the beginnings of the parameter and of the view."""


class _SavedTensor(NamedTuple):
    """Any other saved tensor, and its version."""

    tensor: Any
    version: int


def saving(need: Callable[[Mirror], None]) -> Any:
    """Returns a context manager for a forward pass: autograd saves places in parameters instead of tensors inside it.

    `need` is called in the backward pass with a parameter that has no memory; it gathers it.
    """

    def pack(tensor: Any) -> _SavedPlace | _SavedTensor:
        mirror = mirror_in(tensor)
        if mirror is None:
            # Detached, because an output saved by its own operation would form a reference cycle with it.
            return _SavedTensor(tensor.detach(), tensor._version)
        offset = tensor.storage_offset() - mirror.tensor.storage_offset()
        return _SavedPlace(mirror, tuple(tensor.size()), tensor.stride(), offset)

    def unpack(saved: _SavedPlace | _SavedTensor) -> Any:
        if isinstance(saved, _SavedTensor):
            if saved.tensor._version != saved.version:  # torch does not check tensors that hooks have saved
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{saved.tensor.type()} {list(saved.tensor.shape)} is at version {saved.tensor._version}; expected "
                    f"version {saved.version} instead"
                )
            return saved.tensor
        if not saved.mirror.is_here:
            need(saved.mirror)
        values = saved.mirror.tensor.detach()
        return values.as_strided(saved.size, saved.stride, values.storage_offset() + saved.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class ShardedDriver:
    """Drives one sharded torch module from its calls and from autograd's hooks.

    The gradients of micro-batches under `no_sync` add up, as in torch; the mean is taken over ranks. With `narrow` the
    module computes with, and sends, bfloat16. Other arguments are as in `paceline.FSDP`. `sharded` is the core; its
    `driver` is this object.
    """

    def __init__(
        self,
        module: Adapter,
        group: Group,
        strategy: ShardingStrategy,
        intra_node_size: int | None,
        *,
        narrow: bool,
        ahead: int,
        redundancy: int | None = None,
    ) -> None:
        self.module = module
        self.sharded = ShardedModel(
            module,
            group,
            strategy,
            intra_node_size,
            wire=np.dtype(ml_dtypes.bfloat16) if narrow else None,
            computes=narrow,
            ahead=ahead,
            redundancy=redundancy,
            make_transport=transport_of,
            accumulation=partial(Accumulation, adds_up=True),
            agreed=_observe,
            interrupted=self._drop_dead_pass,
        )
        self.sharded.driver = self
        self._narrow = narrow
        self._pass: UnitRuns | None = None
        """The running backward pass; only the outermost driver has one."""
        self._given: float | None = None
        """The weight of the next backward pass, if the user has given one."""

    def forward(self, call: ModuleCall) -> Any:
        """Returns the module's output; see `paceline.torch.FSDP.forward`."""
        sharded = self.sharded
        if sharded.is_empty:
            return self.module.forward(call)
        if not sharded.is_outermost:
            return self._run_forward(call)
        self._check_runs()
        shapes = (tensor.shape for tensor in tensors_in((call.args, call.kwargs)))
        with sharded.forward_pass(next((shape[0] for shape in shapes if shape), None)):
            return self._run_forward(call)

    @contextmanager
    def weighing(self, weight: float | None) -> Iterator[None]:
        """Sets the weight of the backward pass inside the block; None for its number of samples."""
        self._given = weight
        try:
            yield
        finally:
            self._given = None

    def _run_forward(self, call: ModuleCall) -> Any:
        sharded = self.sharded
        run = UnitRun(partial(self._enter, sharded.synchronizer.rows), self._leave)
        keeping = saving(_need) if sharded.is_outermost and torch.is_grad_enabled() else nullcontext()
        with sharded.running_forward(), keeping:
            call = run.of_inputs(call)
            if self._narrow:
                call = ModuleCall(*mapped(tuple(call), _narrowed))
            return run.of_outputs(self.module.forward(call))

    def _enter(self, rows: int | None) -> None:
        """Begins a backward run; `rows` are the rows of its forward pass, if this is the outermost unit."""
        if self.sharded.is_outermost:
            self.sharded.synchronizer.rows = rows
        with _driver_of(self.sharded.outermost)._running_pass() as running:
            running.enter(self.sharded)

    def _leave(self) -> None:
        with _driver_of(self.sharded.outermost)._running_pass() as running:
            running.leave(self.sharded)

    @contextmanager
    def _running_pass(self) -> Iterator[UnitRuns]:
        """Yields torch's running backward pass; the first call begins it, and an error inside the block ends it."""
        self._drop_dead_pass()
        if self._pass is None:
            self._check_runs()
            self._hand_over()
            self._pass = UnitRuns(AutogradPass(self.sharded.backward_pass(self._next_weight()), self._end_pass))
        try:
            yield self._pass
        except BaseException:
            self._drop_pass()
            raise

    def _check_runs(self) -> None:
        """Refuses a pass that is only recorded."""
        on_device = {flat.parameters[0] for unit in self.sharded.units() for flat in unit.flats if flat.on_device}
        for parameter in on_device:
            assert isinstance(parameter, Mirror)
            if streams_of(parameter.tensor.device).captures():
                raise UnsupportedOp(
                    "a CUDA graph captures this pass, and would run it without the other ranks: capture no pass of a "
                    "module that FSDP wraps"
                )

    def _next_weight(self) -> float:
        if self._given is not None:
            return self._given
        rows, group = self.sharded.synchronizer.rows, self.sharded.group
        if group._core.order.is_leaf:
            return group._core.gradient_weight
        return 1 if rows is None else rows

    def _end_pass(self) -> None:
        with self._running_pass() as running:
            running.end()
        self._pass = None
        self._hand_over()

    def _drop_pass(self) -> None:
        if self._pass is not None:
            dropped, self._pass = self._pass, None
            dropped.abandon()
            self._hand_over()

    def _hand_over(self) -> None:
        """Gives the groups to the next thread: on a device, autograd runs the pass in a thread of its own."""
        units = self.sharded.units()
        if any(flat.on_device for unit in units for flat in unit.flats):
            groups = {self.sharded.group, *(group for unit in units for group in (unit.shards, unit.replicas) if group)}
            for group in groups:
                group.hand_over()

    def _drop_dead_pass(self) -> None:
        if self._pass is not None and self._pass.whole.is_dead:
            self._drop_pass()


def _observe(runner: UnitRunner) -> None:
    """Registers hooks, so that autograd reports every gradient that it leaves in a parameter of these units."""
    for source in runner.sources.values():
        assert isinstance(source, Mirror)
        source.watch(_take)


def _take(mirror: Mirror) -> None:
    """Takes a gradient that autograd has left in a parameter, in the pass of the outermost driver."""
    with _driver_of(_owner_of(mirror).outermost)._running_pass() as running:
        mirror.take_gradient(running.whole.factor)


def _need(mirror: Mirror) -> None:
    """Begins the backward run of a unit when autograd reads its parameter: its output had no tensor to watch."""
    owner = _owner_of(mirror)
    _driver_of(owner)._enter(owner.synchronizer.rows)
    if not mirror.is_here:
        raise StepOrderError("the backward pass needs a sharded parameter whose unit has already finished")


def _owner_of(mirror: Mirror) -> ShardedModel:
    assert isinstance(mirror._owner, ShardedModel)
    return mirror._owner


def _driver_of(sharded: ShardedModel) -> ShardedDriver:
    assert isinstance(sharded.driver, ShardedDriver)
    return sharded.driver


def _narrowed(tensor: Any) -> Any:
    return tensor.bfloat16() if tensor.dtype in (torch.float32, torch.float64) else tensor
