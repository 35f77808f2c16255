"""How autograd drives DDP: adapters for torch parameters, and backward passes that hooks run.

A hook on the parameter tells the `AutogradDriver` of each gradient before autograd stores it. The first gradient
opens a pass of the `GradientSynchronizer`, whose `BucketReducer` then observes the parameters. A second hook writes
the gradient to its home in a bucket, and tells the reducer. A callback of autograd's engine closes the pass, so that
`loss.backward()` raises the errors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.weak import WeakIdKeyDictionary

from paceline._elastic.foreign import local_of
from paceline._group import Group
from paceline._parallel._accumulation import Accumulation
from paceline._parallel._data_parallel import ReplicatedModel
from paceline._parallel._parameter import Parameter
from paceline._parallel._synchronizer import GradientSynchronizer
from paceline._parallel._transport import EngineTransport, GradientTransport
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.torch._tensors import Tensor, array_of, on_host, tensor_of, values_of_all, write_all

_OUTSIDE = -1
"""The number that autograd reports outside of a backward pass."""


_NAME = "a parameter"

HANDLES: Any = WeakIdKeyDictionary()
"""For each tensor, the handles of the hooks that are registered on it."""


def refuse_sync_batch_norm(module: Any) -> None:
    """Refuses `SyncBatchNorm`, which would take the statistics of this rank's samples alone, without a word."""
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            raise UnsupportedOp(
                f"{path or 'the module'} is a SyncBatchNorm, which synchronizes over the default group of "
                "torch.distributed and not over the members of this group: it would take the statistics of this "
                "rank's samples alone. Use GroupNorm or LayerNorm; or BatchNorm, if the statistics of each rank's own "
                "samples will do"
            )


class TorchParameter(Parameter):
    """A torch parameter as the core sees it: it shares the tensor's memory, and its gradient lies in a bucket.

    Autograd computes each gradient into new memory. A hook multiplies the gradient by its weight and writes it to its
    home in the bucket, in one pass over values that are still in the cache. `Tensor.grad` becomes a view of that home,
    and autograd can reuse its memory for the next gradient.
    """

    __slots__ = ("__weakref__", "_autograd_observer", "_earlier", "_handles", "_node", "_slot", "_view", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        super().__init__(array_of(self._local(tensor), _NAME), tensor.requires_grad)
        self._handles: tuple[Any, ...] = ()
        self._earlier: Tensor | None = None

    def _local(self, tensor: Tensor) -> Tensor:
        """Returns what this rank has of the parameter, or of a gradient."""
        return tensor

    def _placed(self, local: Tensor) -> Tensor:
        """Returns the gradient of which this rank has `local`."""
        return local

    @property
    def data(self) -> NDArray[Any]:
        """The values. Setting them writes into the existing memory."""
        return array_of(self._local(self.tensor))

    @data.setter
    def data(self, value: ArrayLike) -> None:
        array_of(self._local(self.tensor))[...] = value

    @property
    def requires_grad(self) -> bool:
        """False if the parameter is frozen."""
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
        return self._slot if gradient is self._view else array_of(self._local(gradient))

    @grad.setter
    def grad(self, value: ArrayLike | None) -> None:
        self._hold(None if value is None else np.array(value, self.dtype))

    @property
    def _home(self) -> NDArray[Any] | None:
        return self._slot

    @_home.setter
    def _home(self, slot: NDArray[Any] | None) -> None:
        self._slot = slot
        self._view = None if slot is None else self._placed(tensor_of(slot))

    def _hold(self, gradient: NDArray[Any] | None) -> None:
        if gradient is None:
            self.tensor.grad = None
        else:
            self.tensor.grad = self._view if gradient is self._slot else self._placed(tensor_of(gradient))

    # Autograd ---------------------------------------------------------------------------------------------------------

    def listen(self, observer: AutogradDriver) -> None:
        """Calls the observer for every gradient from now on; does nothing if the parameter is frozen."""
        if self._handles or not self.requires_grad:
            return
        for handle in HANDLES.get(self.tensor, ()):  # the new wrapper replaces an earlier one
            handle.remove()
        self._autograd_observer = observer
        # The hook is on the accumulating node, not on the tensor, so that `torch.autograd.grad` does not call it.
        self._node = torch.autograd.graph.get_gradient_edge(self.tensor).node
        self._handles = (
            self._node.register_prehook(weakly(self._before)),
            self.tensor.register_post_accumulate_grad_hook(weakly(self._after)),
        )
        HANDLES[self.tensor] = self._handles

    def _before(self, gradients: tuple[Tensor, ...]) -> None:
        self._autograd_observer.before(self)
        # Set the existing gradient aside: the weight applies only to the new one.
        self._earlier, self.tensor.grad = self.tensor.grad, None

    def _after(self, tensor: Tensor) -> None:
        fresh, earlier, view, factor = tensor.grad.to_dense(), self._earlier, self._view, self._autograd_observer.factor
        self._earlier = None
        with torch.no_grad():
            if view is None:  # gradients are dropped, or an abandoned collective may still use the home
                tensor.grad = fresh * factor if earlier is None else earlier.add_(fresh, alpha=factor)
            elif earlier is None:
                torch.mul(fresh, factor, out=view) if factor != 1 else view.copy_(fresh)
                tensor.grad = view
            else:
                if earlier is not view:
                    view.copy_(earlier)
                tensor.grad = view.add_(fresh, alpha=factor)
        self.writes += 1
        self._has_written()
        self._autograd_observer.after(self)

    def _check_runs(self) -> None:
        """Raises if the backward pass is only recorded, to be run later without this code."""

    def _has_written(self) -> None:
        """Called behind each write of a gradient, in the stream that writes it."""


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Wraps a method as a hook that does not keep its object alive.

    Python's cycle collector does not see the references that autograd holds to its hooks.
    """
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        strong = weak()
        if strong is not None:
            strong(*args)

    return call


class TorchModule:
    """A torch module as the core sees it: parameters, for which `make` makes the core's objects, and buffers."""

    def __init__(self, module: Any, make: Callable[[Tensor], TorchParameter]) -> None:
        self._module = module
        self._make = make
        self._parameters: dict[int, TorchParameter] = {}

    def named_parameters(self) -> Iterator[tuple[str, TorchParameter]]:
        """Yields pairs of path and parameter, always the same objects."""
        for path, tensor in self._module.named_parameters(remove_duplicate=False):
            if id(tensor) not in self._parameters:
                self._parameters[id(tensor)] = self._make(tensor)
            yield path, self._parameters[id(tensor)]

    def named_buffers(self) -> Iterable[tuple[str, NDArray[Any]]]:
        """Returns pairs of path and array."""
        buffers = dict(self._module.named_buffers())
        return list(zip(buffers, values_of_all([local_of(buffer) for buffer in buffers.values()]), strict=True))

    def write_back(self, parameters: Mapping[str, NDArray[Any]], buffers: Mapping[str, NDArray[Any]]) -> None:
        """Writes values that were copied from a device; see `paceline._parallel._parameter.write_back`."""
        tensors = {path: p.tensor for path, p in self.named_parameters()} if parameters else {}
        tensors |= dict(self._module.named_buffers())
        write_all({path: local_of(tensors[path]) for path in (*parameters, *buffers)}, {**parameters, **buffers})


class AutogradPass:
    """A backward pass that torch runs. The first hook of the pass makes this object.

    The context manager surrounds the whole pass, and yields the factor by which gradients are multiplied. `done` is
    called when torch has finished the pass, before its `backward()` returns.
    """

    def __init__(self, context: AbstractContextManager[float], done: Callable[[], None]) -> None:
        self._context = ExitStack()
        self.factor = self._context.enter_context(context)
        callback = Callback(done)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._callback = weakref.ref(callback)

    @property
    def is_dead(self) -> bool:
        """True if an error has ended the pass: torch has dropped the callback and will not call it."""
        return self._callback() is None

    def close(self) -> None:
        """Ends the pass, which has all its gradients."""
        self._context.close()

    def abandon(self, error: BaseException) -> None:
        """Ends the pass, which has failed, and drops its gradients."""
        self._context.__exit__(type(error), error, error.__traceback__)


class Callback:
    """A function that torch keeps while the pass lives."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done

    def __call__(self) -> None:
        self._done()


class AutogradAccumulation(Accumulation):
    """An accumulation as in torch: passes add up, and gradients that users wrote are used as they are."""

    def __init__(self, parameters: Mapping[str, Any], sources: Mapping[str, Any]) -> None:
        self._torch_parameters: Mapping[str, TorchParameter] = parameters
        self._left: dict[str, int] = {}
        """Version of each gradient at the end of the last pass."""
        super().__init__(parameters, sources, adds_up=True)

    def add(self, weight: float, *, alone: bool) -> float:
        """See `Accumulation`. In a world of one all passes have equal weight, as without a wrapper."""
        return super().add(float(weight > 0) if alone else weight, alone=False)

    def mark(self) -> None:
        """See `Accumulation`."""
        super().mark()
        self._left = {path: _version(p) for path, p in self._torch_parameters.items()}

    def written_by_others(self, *, or_zeros: bool) -> str | None:
        """Returns None: gradients that users have written are used as they are, as in torch."""
        del or_zeros
        return None

    def drop_if_cleared(self) -> None:
        """Forgets the passes if all of their gradients were cleared, to None or to zeros."""
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


class Uneven:
    """Keeps ranks in step that run out of inputs at different times, with one small message before each reduction.

    It is active only inside of `DDP.join`: there a rank without inputs takes part in reductions until none has any.

    Attributes:
        root: the lowest rank that had an input in the last reduction; 0 outside of `join`.
        reductions: number of reductions in this `join`.
    """

    def __init__(self, group: Any) -> None:
        self.root = 0
        self.reductions = 0
        self._group = group
        self._has_input = False
        """True inside of `join` while this rank has inputs."""

    def open(self) -> None:
        """Allows the ranks different numbers of inputs from now on; all ranks call this."""
        self._has_input, self.root, self.reductions = True, 0, 0

    def close(self) -> None:
        """Ends `open`: all ranks have the same number of inputs again."""
        self._has_input, self.root = False, 0

    def before_reduction(self) -> int:
        """Tells the other ranks that this rank has an input; returns the rank whose buffers all ranks take."""
        if self._has_input:
            self._tell(has_input=True)
        return self.root

    def others_go_on(self) -> bool:
        """Tells the other ranks that this rank has no input left; returns whether any of them will reduce again."""
        self._has_input = False
        return self._tell(has_input=False)

    def _tell(self, *, has_input: bool) -> bool:
        table = np.zeros(self._group.size, np.int64)
        table[self._group.rank] = has_input
        active = np.flatnonzero(self._group.all_reduce(table, label="uneven"))
        if active.size:
            self.root = int(active[0])
            self.reductions += 1
        return bool(active.size)


class AutogradDriver:
    """Drives the synchronizer of one DDP from autograd's hooks.

    `factor` is the weight by which each new gradient is multiplied.

    Args:
        module: the torch module; or the module as the core sees it.
        group: the ranks.
        make: makes the core's object for a parameter.
        carried: makes the transport of gradients if an engine carries them.
        accumulation: makes the accumulation of passes.
        synchronizer: the class of the synchronizer.
        settings: as for `paceline.DDP`.
    """

    def __init__(
        self,
        module: Any,
        group: Group,
        *,
        make: Callable[[Tensor], TorchParameter] = TorchParameter,
        carried: Callable[[Group], GradientTransport] = EngineTransport,
        accumulation: Callable[[Any, Any], Accumulation] | None = None,
        synchronizer: type[GradientSynchronizer] = GradientSynchronizer,
        **settings: Any,
    ) -> None:
        self.module = module if isinstance(module, TorchModule) else TorchModule(module, make)
        self.model = ReplicatedModel(self.module, group, trains_narrow=True, carried=carried, **settings)
        self.uneven = Uneven(group)
        self.synchronizer = synchronizer(
            self.model,
            group,
            accumulation=accumulation or AutogradAccumulation,
            agreed=lambda reducer: self._listen(),
            before_reduction=self.uneven.before_reduction,
        )
        self.factor = 1.0
        self._group = group
        self._weight: float | None = None
        """Weight of the next pass, if the user has given one."""
        self._pass: AutogradPass | None = None
        """The running pass; None if there is none."""
        self._task = _OUTSIDE
        """Autograd's number of that pass."""
        self._begun = 0
        """Number of passes so far."""
        self._on_device = False
        """True if a parameter lies on a device."""

    # Called around forward and backward -------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Agrees on the model with the other ranks, and drops the gradients of a backward pass that raised."""
        if self._pass is not None and torch._C._current_graph_task_id() == _OUTSIDE:
            self._abandon(StepOrderError("the last backward pass did not finish"))
        self.synchronizer.prepare()

    @contextmanager
    def weighing(self, weight: float | None) -> Iterator[None]:
        """Sets the weight of the backward pass inside the block; None for the default."""
        begun, self._weight = self._begun, weight
        try:
            yield
            if self._begun == begun:  # the pass reached no parameter, but the other ranks wait for this rank
                with self.synchronizer.backward_pass(self._next_weight()):
                    pass
        except BaseException as error:
            if self._pass is not None:
                self._abandon(error)
            raise
        finally:
            self._weight = None

    def reduce_without_input(self) -> None:
        """Takes part in a reduction of the other ranks with weight 0."""
        with self.synchronizer.backward_pass(0.0, reduces=True):
            pass
        for _, parameter in self.module.named_parameters():
            parameter.grad = None

    def drop_gradients(self) -> None:
        """Drops all gradients, because their step is undone."""
        self._close(StepOrderError("the step was undone"))
        self.synchronizer.drop_gradients()
        self._hand_over()

    # Called by hooks of the parameters --------------------------------------------------------------------------------

    def before(self, parameter: TorchParameter) -> None:
        """Called when autograd has computed a gradient and is about to store it. Raising ends the backward pass."""
        try:
            task = torch._C._current_graph_task_id()
            if self._pass is None:
                parameter._check_runs()
                self._begin(task)
            elif task != self._task:
                raise StepOrderError(
                    "a backward pass began before the last one was finished: either it is nested (checkpoint with "
                    "use_reentrant=True, which is not supported), or the last one raised and no forward pass "
                    "followed"
                )
            if parameter._observer is not None:
                parameter._observer.before_gradient(parameter)
        except BaseException as error:
            self._abandon(error)
            raise

    def after(self, parameter: TorchParameter) -> None:
        """Called when the gradient has been stored in its home."""
        if parameter._observer is None:
            return
        try:
            parameter._observer.after_gradient(parameter)
        except BaseException as error:
            self._abandon(error)
            raise

    def _begin(self, task: int) -> None:
        self._begun += 1
        self._hand_over()
        self._pass = AutogradPass(self.synchronizer.backward_pass(self._next_weight()), self._end)
        self.factor = self._pass.factor
        self._task = task

    def _next_weight(self) -> float:
        return self._group._core.gradient_weight if self._weight is None else self._weight

    def _end(self) -> None:
        """Ends the pass: autograd has computed all gradients."""
        running, self._pass = self._pass, None
        if running is not None:  # otherwise it was abandoned before its end
            try:
                running.close()
            finally:
                self._hand_over()

    def _abandon(self, error: BaseException) -> None:
        """Drops all gradients of a failed attempt, because some of them may be reduced and some not."""
        self._close(error)
        self.synchronizer.abandon()
        self._hand_over()

    def _close(self, error: BaseException) -> None:
        running, self._pass = self._pass, None
        if running is not None:
            running.abandon(error)

    def _hand_over(self) -> None:
        """Gives the group to the next thread: on a device, autograd runs the pass in a thread of its own."""
        if self._on_device:
            self._group.hand_over()

    def _listen(self) -> None:
        for _, parameter in self.module.named_parameters():
            self._on_device = self._on_device or not on_host(parameter.tensor)
            parameter.listen(self)
