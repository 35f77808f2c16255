"""A torch parameter as a `paceline.Parameter`: it shares the values, and its gradient is stored in a bucket.

Autograd computes each gradient into new memory. It is then multiplied by its weight and written to its place in the
bucket (its "home"), and `Tensor.grad` becomes a view of that place: one pass over values that are still in the cache,
and autograd can reuse the memory for the next gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.weak import WeakIdKeyDictionary

from paceline.errors import UnsupportedOp
from paceline.parallel.parameter import Parameter
from paceline.torch.tensors import Tensor, array_of, tensor_of

__all__ = ["AutogradObserver", "TorchModule", "TorchParameter"]


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
