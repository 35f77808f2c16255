"""A sharded model driven by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import ml_dtypes
import torch

from paceline.errors import StepOrderError
from paceline.parallel._fully_sharded import FSDP
from paceline.parallel._ranks import ShardRanks
from paceline.parallel._synchronizer import GradientReducer
from paceline.parallel.sharding._placement import ShardingStrategy
from paceline.parallel.sharding._runner import Units
from paceline.parallel.sharding._unit import Unit
from paceline.torch._sharded_tensors import Adapter, Call, Mirror, mapped, mirror_in, tensors_in

__all__ = ["Engine", "Pass", "Run", "saving"]


class Pass:
    """A backward pass under way. To be made inside of it.

    Args:
        context: of the whole pass; gives the factor.
        running: makes the context of a unit's run.
        done: called when torch is through with the pass, before its `backward()` returns.

    Attributes:
        factor: what gradients are to be multiplied by.
    """

    def __init__(
        self,
        context: AbstractContextManager[float],
        running: Callable[[Unit], AbstractContextManager[None]],
        done: Callable[[], None],
    ) -> None:
        self._running = running
        self._inside: dict[int, list[ExitStack]] = {}
        """Runs under way, by the unit's identity."""
        self._whole = ExitStack()
        self.factor = self._whole.enter_context(context)
        callback = _Callback(done)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._callback = ref(callback)

    @property
    def is_dead(self) -> bool:
        """True if torch has given the pass up: an error has ended it. Nobody calls back in that case."""
        return self._callback() is None

    def is_inside(self, unit: Unit) -> bool:
        """True between `enter` and `leave`."""
        return bool(self._inside.get(id(unit)))

    def enter(self, unit: Unit) -> None:
        """A run of a unit begins."""
        run = ExitStack()
        run.enter_context(self._running(unit))
        self._inside.setdefault(id(unit), []).append(run)

    def leave(self, unit: Unit) -> None:
        """A run of a unit ends; which of several does not matter."""
        if self.is_inside(unit):
            self._inside[id(unit)].pop().close()

    def end(self) -> None:
        """All runs end, also those of units whose inputs take no gradient, and with them the pass."""
        for runs in self._inside.values():
            while runs:
                runs.pop().close()
        self._whole.close()

    def abandon(self) -> None:
        """The pass has failed: what it has gathered counts for nothing."""
        error = StepOrderError("the backward pass did not come to its end")
        for stack in [run for runs in self._inside.values() for run in runs] + [self._whole]:
            with suppress(StepOrderError):
                stack.__exit__(type(error), error, None)


class _Callback:
    """A function that torch keeps for as long as the pass lives."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done

    def __call__(self) -> None:
        self._done()


class Run:
    """One forward run of a unit, and the run backward that it will have.

    Args:
        enter: called when that begins.
        leave: called when it ends.
    """

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter = enter
        self._leave = leave
        self._inputs = self._awaited = 0
        self._is_entered = False

    def of_inputs(self, call: Call) -> Call:
        """What the unit is to be called with, so that the run hears of the gradients."""
        args, kwargs = mapped((call.args, call.kwargs), self._watch_input)
        return Call(args, kwargs)

    def of_outputs(self, outputs: Any) -> Any:
        """What the unit has returned, from where the run hears of the gradients."""
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._begin)
        return outputs

    def _watch_input(self, tensor: Any) -> Any:
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        self._inputs += 1
        alias = tensor.view_as(tensor)  # its gradient is that of this run alone, whoever else uses the tensor
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


class _Place(NamedTuple):
    """A view of a parameter."""

    mirror: Mirror
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """Any other tensor, and how often it had been written."""

    tensor: Any
    version: int


def saving(need: Callable[[Mirror], None]) -> Any:
    """For a forward pass inside the block.

    Args:
        need: called in the backward pass with a parameter that has no memory; gives it some.
    """

    def pack(tensor: Any) -> _Place | _Kept:
        mirror = mirror_in(tensor)
        if mirror is None:
            # Detached, for an operation's own output would keep the operation alive that keeps it.
            return _Kept(tensor.detach(), tensor._version)
        return _Place(mirror, tuple(tensor.size()), tensor.stride(), tensor.storage_offset())

    def unpack(saved: _Place | _Kept) -> Any:
        if isinstance(saved, _Kept):
            if saved.tensor._version != saved.version:  # torch does not check what hooks have kept
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{saved.tensor.type()} {list(saved.tensor.shape)} is at version {saved.tensor._version}; expected "
                    f"version {saved.version} instead"
                )
            return saved.tensor
        if not saved.mirror.is_here:
            need(saved.mirror)
        return saved.mirror.tensor.detach().as_strided(saved.size, saved.stride, saved.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class Engine(FSDP):
    """Spreads one torch module.

    The gradients of micro-batches under `no_sync` are added up, as torch does it; the mean is taken over ranks.

    Args:
        module: as NumPy modules are seen.
        narrow: compute with, and send, bfloat16.
        others: as those of `FSDP`.
    """

    module: Adapter
    _root: Engine

    def __init__(
        self,
        module: Adapter,
        group: ShardRanks,
        strategy: ShardingStrategy,
        intra_node_size: int | None,
        *,
        narrow: bool,
        ahead: int,
    ) -> None:
        self._computes = narrow
        self._pass: Pass | None = None
        self._given: float | None = None
        """The weight of the next backward pass, if it is not B."""
        wire = ml_dtypes.bfloat16 if narrow else None
        super().__init__(module, group, strategy, intra_node_size, communication_dtype=wire, ahead=ahead)

    @contextmanager
    def weighing(self, weight: float | None) -> Iterator[None]:
        """For a backward pass inside the block that counts so much; None for its number of samples."""
        self._given = weight
        try:
            yield
        finally:
            self._given = None

    def drop_gradients(self) -> None:
        """As `Wrapper.drop_gradients`."""
        self._drop_dead_pass()
        super().drop_gradients()

    def _prepare(self, *, may_change: bool) -> GradientReducer:
        self._drop_dead_pass()
        return super()._prepare(may_change=may_change)

    def _agree(self, *, may_change: bool) -> Units:
        units = super()._agree(may_change=may_change)
        for source in units.sources.values():
            assert isinstance(source, Mirror)
            source.watch(_take)
        return units

    def _counts(self) -> float:
        return self._round.weight / max(self._round.micro_batches, 1)

    def _remember_rows(self, x: Call) -> None:
        shapes = (tensor.shape for tensor in tensors_in((x.args, x.kwargs)))
        self._rows = next((shape[0] for shape in shapes if shape), None)

    def _run_forward(self, x: Call) -> Any:
        run = Run(partial(self._enter, self._rows), self._leave)
        keeping = saving(_need) if self._root is self and torch.is_grad_enabled() else nullcontext()
        with self._root._all_units().running_forward(self._unit), keeping:
            call = run.of_inputs(x)
            if self._computes:
                call = Call(*mapped(tuple(call), _narrowed))
            return run.of_outputs(self.module.forward(call))

    def _enter(self, rows: int | None) -> None:
        """A run backward begins; `rows`: of the forward pass that it belongs to, if this is the outermost unit."""
        if self._root is self:
            self._rows = rows
        with self._root._running_pass() as running:
            running.enter(self._unit)

    def _leave(self) -> None:
        with self._root._running_pass() as running:
            running.leave(self._unit)

    @contextmanager
    def _running_pass(self) -> Iterator[Pass]:
        """The backward pass that torch is in; it begins with the first call. An error inside of the block ends it."""
        self._drop_dead_pass()
        if self._pass is None:
            weight = (1 if self._rows is None else self._rows) if self._given is None else self._given
            self._pass = Pass(self._backward_pass(weight), self._all_units().running_backward, self._end_pass)
        try:
            yield self._pass
        except BaseException:
            self._drop_pass()
            raise

    def _end_pass(self) -> None:
        with self._running_pass() as running:
            running.end()
        self._pass = None
        self._owes = self._owes and not self._syncing

    def _drop_pass(self) -> None:
        if self._pass is not None:
            dropped, self._pass = self._pass, None
            dropped.abandon()

    def _drop_dead_pass(self) -> None:
        if self._pass is not None and self._pass.is_dead:
            self._drop_pass()


def _take(mirror: Mirror) -> None:
    """Autograd has left a gradient."""
    owner = mirror._owner
    assert isinstance(owner, Engine)
    with owner._root._running_pass() as running:
        mirror.take_gradient(running.factor)


def _need(mirror: Mirror) -> None:
    """Autograd reads a parameter of a unit that it has not entered: what that returned was not looked into."""
    owner = mirror._owner
    assert isinstance(owner, Engine)
    owner._enter(owner._rows)
    if not mirror.is_here:
        raise StepOrderError("the backward pass needs a parameter that is spread over the ranks, after its unit's end")


def _narrowed(tensor: Any) -> Any:
    return tensor.bfloat16() if tensor.dtype in (torch.float32, torch.float64) else tensor
