"""A torch parameter as a `paceline.Parameter`: the same values, and its gradient at home in a bucket.

Autograd computes a gradient into memory of its own. From there it goes to its home, weighted on the way, and
`Tensor.grad` is a view of the home: one pass over values that are still in the cache, and the fresh memory is free for
the next gradient at once.
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

__all__ = ["Hearer", "ShownModule", "ShownParameter"]


_HANDLES: Any = WeakIdKeyDictionary()
"""The hooks of each tensor that has some."""


class Hearer(Protocol):
    """Hears of every gradient that autograd accumulates.

    Attributes:
        factor: what gradients are multiplied by.
    """

    factor: float

    def before(self, parameter: ShownParameter) -> None:
        """A gradient is there. Raising ends the backward pass."""

    def after(self, parameter: ShownParameter) -> None:
        """It is at home."""


class ShownParameter(Parameter):
    """A torch parameter, for wrappers of `paceline.parallel`.

    Attributes:
        tensor: the parameter.
    """

    __slots__ = ("__weakref__", "_earlier", "_handles", "_hearer", "_node", "_slot", "_view", "tensor")

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
        """`Tensor.grad` as an array; at home, it is the home itself."""
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

    def listen(self, hearer: Hearer) -> None:
        """Tells of every gradient from now on; a frozen parameter has none to tell of."""
        if self._handles or not self.requires_grad:
            return
        for handle in _HANDLES.get(self.tensor, ()):  # a module that is wrapped again is the new wrapper's
            handle.remove()
        self._hearer = hearer
        # Hooks of the node that accumulates, not of the tensor: `torch.autograd.grad` shall not wake them.
        self._node = torch.autograd.graph.get_gradient_edge(self.tensor).node
        self._handles = (
            self._node.register_prehook(_weakly(self._before)),
            self.tensor.register_post_accumulate_grad_hook(_weakly(self._after)),
        )
        _HANDLES[self.tensor] = self._handles

    def _before(self, gradients: tuple[Tensor, ...]) -> None:
        self._hearer.before(self)
        # What is there is put aside: the weight is for what comes now.
        self._earlier, self.tensor.grad = self.tensor.grad, None

    def _after(self, tensor: Tensor) -> None:
        fresh, earlier, view, factor = tensor.grad.to_dense(), self._earlier, self._view, self._hearer.factor
        self._earlier = None
        with torch.no_grad():
            if view is None:  # it does not count, or a collective that was given up may still use its home
                tensor.grad = fresh * factor if earlier is None else earlier.add_(fresh, alpha=factor)
            elif earlier is None:
                torch.mul(fresh, factor, out=view) if factor != 1 else view.copy_(fresh)
                tensor.grad = view
            else:
                if earlier is not view:
                    view.copy_(earlier)
                tensor.grad = view.add_(fresh, alpha=factor)
        self.writes += 1
        self._hearer.after(self)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method for a hook that does not keep its object: autograd keeps tensors where Python cannot see the cycle."""
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        strong = weak()
        if strong is not None:
            strong(*args)

    return call


class ShownModule:
    """A torch module as `paceline.parallel` sees one: its parameters and buffers."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._shown: dict[int, ShownParameter] = {}

    def named_parameters(self) -> Iterator[tuple[str, ShownParameter]]:
        """Pairs of path and parameter; always the same objects."""
        for path, tensor in self._module.named_parameters(remove_duplicate=False):
            if id(tensor) not in self._shown:
                self._shown[id(tensor)] = ShownParameter(tensor)
            yield path, self._shown[id(tensor)]

    def named_buffers(self) -> Iterable[tuple[str, NDArray[Any]]]:
        """Pairs of path and array."""
        return [(path, array_of(buffer)) for path, buffer in self._module.named_buffers()]

    def forward(self, x: Any) -> Any:
        """The output."""
        return self._module(x)

    def backward(self, dy: Any) -> None:
        """Autograd does it."""
        raise UnsupportedOp("gradients come from autograd: call loss.backward()")
