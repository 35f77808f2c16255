"""torch's parameters as those of the FSDP for NumPy modules: both see the same memory, and one change is both's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from paceline.parallel.fsdp import FSDP
from paceline.parallel.parameter import Parameter
from paceline.torch.sharding.norms import PartOfGradient
from paceline.torch.tensors import array_of, nothing, tensor_of

__all__ = ["Mirror", "Piece", "mirror_in", "mirror_of", "piece_of"]

_MARK = "_paceline_parameter"
"""Attribute of a tensor: however often modules are wrapped, and wherever it is tied, a parameter has one mirror."""


class Mirror(Parameter):
    """A module's parameter. Its memory is part of its unit's flat array while that is whole, and none at other times.

    Autograd accumulates into `tensor.grad` as ever. What it has left there is taken over by `take_gradient`, so that
    gradients are added up, wait and leave as those of NumPy modules do.

    Attributes:
        tensor: the `torch.nn.Parameter`.
    """

    __slots__ = ("_handle", "tensor")

    def __init__(self, tensor: Any, name: str) -> None:
        self.tensor = tensor
        self._handle: Any = None
        super().__init__(array_of(tensor, f"parameter {name!r}"), tensor.requires_grad)

    @property
    def requires_grad(self) -> bool:
        """The tensor's."""
        return bool(self.tensor.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.tensor.requires_grad_(value)

    @property
    def is_here(self) -> bool:
        """True if the tensor has its values."""
        return self._data is not None

    def watch(self, written: Callable[[Mirror], None]) -> None:
        """From now on `written` hears of each gradient that autograd has left in the tensor. Does nothing twice."""
        if self._handle is None:
            self._handle = self.tensor.register_post_accumulate_grad_hook(lambda tensor: written(self))

    def take_gradient(self, factor: float) -> None:
        """Takes over what autograd has left, times a factor; with 0 it is dropped, even NaN."""
        gradient, self.tensor.grad = self.tensor.grad, None
        if factor == 0:
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.dtype == torch.bfloat16:
            gradient = gradient.float()  # micro-batches are added up with all bits
        if factor != 1:
            gradient.mul_(factor)
        self.accumulate(array_of(gradient))

    def _cut(self, values: NDArray[Any]) -> Parameter:
        return Piece(values, self.requires_grad)

    def _place(self, values: NDArray[Any] | None) -> None:
        super()._place(values)
        # Same object, other memory: modules, optimizers and autograd's accumulators refer to the object.
        self.tensor.data = nothing(self.tensor) if values is None else tensor_of(values)


class Piece(Parameter):
    """What of a parameter this rank trains.

    Attributes:
        tensor: a `torch.nn.Parameter` over the same elements; its gradient is the piece's.
    """

    __slots__ = ("tensor",)

    def __init__(self, values: NDArray[Any], requires_grad: bool) -> None:
        self.tensor = torch.nn.Parameter(tensor_of(values), requires_grad=requires_grad)
        setattr(self.tensor, _MARK, self)
        super().__init__(values, requires_grad)

    @property
    def requires_grad(self) -> bool:
        """The tensor's."""
        return bool(self.tensor.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.tensor.requires_grad_(value)

    @property
    def _grad(self) -> NDArray[Any] | None:
        gradient = self.tensor.grad  # the user may have cleared it, or put another one there
        return None if gradient is None else array_of(gradient)

    @_grad.setter
    def _grad(self, value: NDArray[Any] | None) -> None:
        gradient = None if value is None else tensor_of(value)
        if gradient is not None and isinstance(self._owner, FSDP) and self._owner.spreads:
            gradient = gradient.as_subclass(PartOfGradient)
        self.tensor.grad = gradient

    def _place(self, values: NDArray[Any] | None) -> None:
        super()._place(values)
        assert values is not None
        self.tensor.data = tensor_of(values)

    def _move(self, values: NDArray[Any]) -> None:
        self.tensor.grad = None
        super()._move(values)
        self.tensor.data = tensor_of(values)


def mirror_of(tensor: Any, name: str) -> Mirror:
    """The mirror of a module's parameter; made at first use.

    Args:
        tensor: the parameter.
        name: its path, for errors.

    Raises:
        UnsupportedOp: its memory cannot be seen by NumPy.
    """
    found = getattr(tensor, _MARK, None)
    if found is None:
        found = Mirror(tensor, name)
        setattr(tensor, _MARK, found)
    assert isinstance(found, Mirror)
    return found


def mirror_in(tensor: Any) -> Mirror | None:
    """The mirror of the parameter in whose present memory a tensor lies, None if it is in none."""
    parameter = tensor if tensor._base is None else tensor._base
    mirror = getattr(parameter, _MARK, None)
    if not isinstance(mirror, Mirror) or (tensor is not parameter and _address(tensor) != _address(parameter)):
        return None
    return mirror if tensor.dtype == parameter.dtype else None  # bits seen as another type stay as they are


def piece_of(tensor: Any) -> Piece | None:
    """The piece that a tensor is, None if it is none."""
    piece = getattr(tensor, _MARK, None)
    return piece if isinstance(piece, Piece) else None


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())
