"""How the gradients of autograd get into buckets, and when a backward pass begins and ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.weak import WeakIdKeyDictionary

from paceline.errors import StepOrderError, UnsupportedOp
from paceline.parallel._accumulation import Accumulation
from paceline.parallel._bucket_reducer import Reducer
from paceline.parallel._data_parallel import DDP
from paceline.parallel._parameter import Parameter
from paceline.parallel._synchronizer import GradientReducer, checked_weight
from paceline.torch.tensors import Tensor, array_of, tensor_of

__all__ = ["AutogradObserver", "Passes", "TorchModule", "TorchParameter", "Uneven"]


_HANDLES: Any = WeakIdKeyDictionary()
"""The handles of the hooks that are registered on each tensor."""


class AutogradObserver(Protocol):
    """Is called before and after autograd accumulates a gradient.

    Attributes:
        factor: weight that each new gradient is multiplied by.
    """

    factor: float

    def before(self, parameter: TorchParameter) -> None:
        """Autograd has computed a gradient, and it is about to be stored. Raising ends the backward pass."""

    def after(self, parameter: TorchParameter) -> None:
        """The gradient has been stored in its home."""


class TorchParameter(Parameter):
    """Presents a torch parameter to the wrappers of `paceline.parallel`.

    Attributes:
        tensor: the parameter.
    """

    __slots__ = ("__weakref__", "_autograd_observer", "_earlier", "_handles", "_node", "_slot", "_view", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        super().__init__(array_of(tensor), tensor.requires_grad)
        self._handles: tuple[Any, ...] = ()
        self._earlier: Tensor | None = None

    @property
    def data(self) -> NDArray[Any]:
        """The values. Setting writes into the memory that is there."""
        return array_of(self.tensor)

    @data.setter
    def data(self, value: ArrayLike) -> None:
        array_of(self.tensor)[...] = value

    @property
    def requires_grad(self) -> bool:
        """False if it is frozen."""
        return bool(self.tensor.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.tensor.requires_grad_(value)

    @property
    def grad(self) -> NDArray[Any] | None:
        """`Tensor.grad` as an array; the home itself if the gradient is stored there."""
        gradient = self.tensor.grad
        if gradient is None:
            return None
        return self._slot if gradient is self._view else array_of(gradient)

    @grad.setter
    def grad(self, value: ArrayLike | None) -> None:
        self._hold(None if value is None else np.array(value, self.dtype))

    @property
    def _home(self) -> NDArray[Any] | None:
        return self._slot

    @_home.setter
    def _home(self, slot: NDArray[Any] | None) -> None:
        self._slot = slot
        self._view = None if slot is None else tensor_of(slot)

    def _hold(self, gradient: NDArray[Any] | None) -> None:
        if gradient is None:
            self.tensor.grad = None
        else:
            self.tensor.grad = self._view if gradient is self._slot else tensor_of(gradient)

    # Autograd ---------------------------------------------------------------------------------------------------------

    def listen(self, observer: AutogradObserver) -> None:
        """Calls the observer for every gradient from now on; does nothing if the parameter is frozen."""
        if self._handles or not self.requires_grad:
            return
        for handle in _HANDLES.get(self.tensor, ()):  # the module was wrapped before: the new wrapper replaces it
            handle.remove()
        self._autograd_observer = observer
        # The hooks are on the accumulating node, not on the tensor, so that `torch.autograd.grad` does not call them.
        self._node = torch.autograd.graph.get_gradient_edge(self.tensor).node
        self._handles = (
            self._node.register_prehook(_weakly(self._before)),
            self.tensor.register_post_accumulate_grad_hook(_weakly(self._after)),
        )
        _HANDLES[self.tensor] = self._handles

    def _before(self, gradients: tuple[Tensor, ...]) -> None:
        self._autograd_observer.before(self)
        # The gradient so far is set aside: the weight applies to the new one only.
        self._earlier, self.tensor.grad = self.tensor.grad, None

    def _after(self, tensor: Tensor) -> None:
        fresh, earlier, view, factor = tensor.grad.to_dense(), self._earlier, self._view, self._autograd_observer.factor
        self._earlier = None
        with torch.no_grad():
            if view is None:  # the pass does not count, or an abandoned collective may still use the home
                tensor.grad = fresh * factor if earlier is None else earlier.add_(fresh, alpha=factor)
            elif earlier is None:
                torch.mul(fresh, factor, out=view) if factor != 1 else view.copy_(fresh)
                tensor.grad = view
            else:
                if earlier is not view:
                    view.copy_(earlier)
                tensor.grad = view.add_(fresh, alpha=factor)
        self.writes += 1
        self._autograd_observer.after(self)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Wraps a method as a hook that does not keep its object alive.

    Python's cycle collector does not see the references that autograd has to its hooks.
    """
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        strong = weak()
        if strong is not None:
            strong(*args)

    return call


class TorchModule:
    """Presents a torch module to `paceline.parallel`: its parameters and buffers."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._parameters: dict[int, TorchParameter] = {}

    def named_parameters(self) -> Iterator[tuple[str, TorchParameter]]:
        """Pairs of path and parameter; always the same objects."""
        for path, tensor in self._module.named_parameters(remove_duplicate=False):
            if id(tensor) not in self._parameters:
                self._parameters[id(tensor)] = TorchParameter(tensor)
            yield path, self._parameters[id(tensor)]

    def named_buffers(self) -> Iterable[tuple[str, NDArray[Any]]]:
        """Pairs of path and array."""
        return [(path, array_of(buffer)) for path, buffer in self._module.named_buffers()]

    def forward(self, x: Any) -> Any:
        """The output."""
        return self._module(x)

    def backward(self, dy: Any) -> None:
        """Not available: autograd runs the backward pass.

        Raises:
            UnsupportedOp: always.
        """
        raise UnsupportedOp("gradients come from autograd: call loss.backward()")


class Uneven:
    """Tracks which ranks still have inputs, by one small message before each reduction; inside of `join` only.

    Attributes:
        root: the lowest rank that took part in the last reduction with an input; 0 outside of `join`.
        reductions: number of reductions in this `join`.
    """

    def __init__(self, group: Any) -> None:
        self.root = 0
        self.reductions = 0
        self._group = group
        self._joining = False

    def open(self) -> None:
        """Allows different numbers of inputs on the ranks from now on; all ranks call this."""
        self._joining, self.root, self.reductions = True, 0, 0

    def close(self) -> None:
        """Ends that: all ranks have the same number of inputs again."""
        self._joining, self.root = False, 0

    def before_reduction(self) -> None:
        """Tells the other ranks that this rank takes part with an input."""
        if self._joining:
            self._tell(has_input=True)

    def others_go_on(self) -> bool:
        """Tells the other ranks that this rank has no input left; returns whether they will reduce again."""
        return self._tell(has_input=False)

    def _tell(self, *, has_input: bool) -> bool:
        table = np.zeros(self._group.size, np.int64)
        table[self._group.rank] = has_input
        active = np.flatnonzero(self._group.all_reduce(table, label="uneven"))
        if active.size:
            self.root = int(active[0])
            self.reductions += 1
        return bool(active.size)


_OUTSIDE = -1
"""The number that autograd reports outside of a backward pass."""


class SummedPasses(Accumulation):
    """An accumulation in which passes add up, as they do in torch: the mean over the ranks is taken of their sum.

    The weight of a rank is the average weight of its passes. So with the same weights in each pass, the result is the
    sum over the passes of the mean over the ranks.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self._torch_parameters: Mapping[str, TorchParameter] = parameters
        self._left: dict[str, int] = {}
        """Version of each gradient when the last pass left it."""

    @property
    def counts(self) -> float:
        """See `Accumulation`."""
        return self.weight / max(1, self.micro_batches)

    def add(self, weight: float, *, alone: bool) -> float:
        """See `Accumulation`. In a world of one all passes have the same weight, as without a wrapper."""
        return super().add(float(weight > 0) if alone else weight, alone=False)

    def mark(self) -> None:
        """See `Accumulation`."""
        super().mark()
        self._left = {path: _version(p) for path, p in self._torch_parameters.items()}

    def written_by_others(self, *, or_zeros: bool) -> str | None:
        """None: gradients that the user has written are used as they are, as in torch."""
        del or_zeros
        return None

    def drop_if_cleared(self) -> None:
        """Forgets a round all of whose gradients were cleared, by None or by zeros."""
        if not self.micro_batches:
            return
        changed = any(_version(p) != self._left[path] for path, p in self._torch_parameters.items())
        if changed and not any(
            p.tensor.grad.any() for p in self._torch_parameters.values() if p.tensor.grad is not None
        ):
            self.drop()


def _version(parameter: TorchParameter) -> int:
    """The gradient's version, which changes whenever torch changes the gradient; -1 without a gradient."""
    gradient = parameter.tensor.grad
    return -1 if gradient is None else int(gradient._version)


class Passes(DDP):
    """Reduces the gradients of a torch module during the backward pass; arguments as of `paceline.DDP`.

    Attributes:
        factor: see `AutogradObserver`.
        uneven: coordinates ranks that run out of inputs before others.
    """

    module: TorchModule
    _round: Accumulation
    _trains_narrow = True

    def __init__(self, module: Any, group: Any, **settings: Any) -> None:
        super().__init__(TorchModule(module), group, **settings)
        self.factor = 1.0
        self.uneven = Uneven(group)
        self._weight: float | None = None
        """Weight of the next pass, if the user has given one."""
        self._watch: AbstractContextManager[None] | None = None
        """Watches gradients while a pass is under way; None otherwise."""
        self._task = _OUTSIDE
        """Autograd's number of the pass that is under way."""
        self._sends = True
        """Whether the pass that is under way ends with a reduction."""
        self._begun = 0
        """Number of passes so far."""

    # Called around forward and backward -------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Agrees on the model with the other ranks, and drops the rest of a backward pass that raised."""
        if self._watch is not None and torch._C._current_graph_task_id() == _OUTSIDE:
            self._abandon(StepOrderError("the last backward pass did not finish"))
        self.prepare()

    @contextmanager
    def weighing(self, weight: float | None) -> Iterator[None]:
        """Gives the backward pass inside the block a weight; None for the usual one."""
        begun, self._weight = self._begun, weight
        try:
            yield
            if self._begun == begun:  # the pass reached no parameter, but the other ranks wait for this one
                self._begin()
                self._end()
        except BaseException as error:
            if self._watch is not None:
                self._abandon(error)
            raise
        finally:
            self._weight = None

    def sync_gradients(self, weight: float | None = None) -> None:
        """Reduces the gradients that passes in `no_sync` have accumulated; does nothing if there are none."""
        if weight is not None:
            raise StepOrderError("each pass got its weight in backward(): sync_gradients() takes none")
        self._prepare(may_change=False)
        self._round.drop_if_cleared()
        if self._round.micro_batches:
            with self._all_or_nothing():
                self.uneven.before_reduction()
                self._reduce()

    def reduce_without_input(self) -> None:
        """Takes part in a reduction of the other ranks with weight zero."""
        self._prepare(may_change=False)
        self._round.open()
        self._round.add(0.0, alone=False)
        with self._all_or_nothing():
            self._reduce()
        for _, parameter in self.named_parameters():
            parameter.grad = None

    def drop_gradients(self) -> None:
        """See `Wrapper`."""
        self._close(StepOrderError("the step was undone"))
        super().drop_gradients()

    # Autograd, through the parameters ---------------------------------------------------------------------------------

    def before(self, parameter: TorchParameter) -> None:
        """See `AutogradObserver`."""
        try:
            task = torch._C._current_graph_task_id()
            if self._watch is None:
                self._begin()
                self._task = task
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
            elif task != self._task:
                raise StepOrderError(
                    "a backward pass began before the last one was finished: either it is nested (checkpoint with "
                    "use_reentrant=True, which DDP does not support), or the last one raised and no forward pass "
                    "followed"
                )
            if parameter._observer is not None:
                parameter._observer.before_gradient(parameter)
        except BaseException as error:
            self._abandon(error)
            raise

    def after(self, parameter: TorchParameter) -> None:
        """See `AutogradObserver`."""
        if parameter._observer is None:
            return
        try:
            parameter._observer.after_gradient(parameter)
        except BaseException as error:
            self._abandon(error)
            raise

    def _begin(self) -> None:
        reducer = self._prepare(may_change=False)
        self._begun += 1
        self._sends = self._syncing
        self._round.open()
        weight = checked_weight(self.group.share if self._weight is None else self._weight)
        self.factor = self._round.add(weight, alone=self.group.size == 1)
        counts = reducer.ignoring if self.factor == 0 else reducer.watching
        if self._sends:
            self.uneven.before_reduction()
        self._watch = counts(weight=self._round.counts, early=self._sends)
        self._watch.__enter__()

    def _end(self) -> None:
        """Ends the pass: autograd has computed all gradients."""
        watch, self._watch = self._watch, None
        if watch is None:  # abandoned before its end
            return
        with self._all_or_nothing():
            watch.__exit__(None, None, None)
            if self._sends:
                self._reduce()

    def _abandon(self, error: BaseException) -> None:
        """Drops all gradients of a failed attempt, because some of them may be reduced and some not."""
        self._close(error)
        if self._reducer is not None:
            self._reducer.give_up()
            self._round.reset()
            self._round.mark()

    def _close(self, error: BaseException) -> None:
        """Stops watching gradients."""
        watch, self._watch = self._watch, None
        if watch is not None:
            try:
                watch.__exit__(type(error), error, error.__traceback__)
            except BaseException as same:
                if same is not error:
                    raise

    # Differences to NumPy ---------------------------------------------------------------------------------------------

    def _new_round(self, reducer: GradientReducer) -> Accumulation:
        return SummedPasses(reducer.parameters)

    def _agree(self, *, may_change: bool) -> Reducer:
        reducer = super()._agree(may_change=may_change)
        for _, parameter in self.module.named_parameters():
            parameter.listen(self)
        return reducer

    def _give_buffers(self, root: int = 0) -> None:
        super()._give_buffers(self.uneven.root)
