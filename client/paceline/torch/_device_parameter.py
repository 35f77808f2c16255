"""A torch parameter whose gradient stays a tensor: for modules on a device, or whose gradients an engine carries."""

from __future__ import annotations

import math
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from paceline._parallel._parameter import Parameter
from paceline.errors import UnsupportedOp
from paceline.torch._autograd import TorchParameter
from paceline.torch._device_streams import streams_of
from paceline.torch._tensors import Tensor, array_of, numpy_dtype, on_host, values_of


class DeviceParameter(TorchParameter):
    """A torch parameter on a device, or on the CPU.

    Its gradient and the gradient's home in a `TensorBucket` are tensors: `grad`, `_home` and `_hold` have tensors where
    other parameters have arrays. The values are read as a copy if they lie on a device. `written` is the stream in
    which autograd has written the gradient last; None if a bucket has waited for it since.
    """

    __slots__ = ("_streams", "written")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._streams = streams_of(tensor.device)
        # Only shape and dtype are asked for: an array of zeros takes no memory.
        shape = tuple(self._local(tensor).shape)
        Parameter.__init__(self, np.broadcast_to(np.zeros((), numpy_dtype(tensor.dtype)), shape), tensor.requires_grad)
        self._data = None
        self._handles: tuple[Any, ...] = ()
        self._earlier: Tensor | None = None
        self.written: Any = None

    @property
    def data(self) -> NDArray[Any]:
        """The values; a copy if they lie on a device. Setting them writes into the existing memory."""
        return values_of(self._local(self.tensor))

    @data.setter
    def data(self, value: ArrayLike) -> None:
        local = self._local(self.tensor)
        if on_host(local):
            array_of(local)[...] = value
            return
        with torch.no_grad():
            local.copy_(_as_tensor(np.asarray(value, self.dtype)))

    @property
    def grad(self) -> Any:
        """`Tensor.grad`, a tensor; the home itself if the gradient is stored there."""
        gradient = self.tensor.grad
        return None if gradient is None else self._slot if gradient is self._view else self._local(gradient)

    @grad.setter
    def grad(self, value: Any) -> None:
        self._hold(value)

    @property
    def _home(self) -> Any:
        return self._slot

    @_home.setter
    def _home(self, slot: Any) -> None:
        self._slot = slot
        self._view = None if slot is None else self._placed(slot)

    def _hold(self, gradient: Any) -> None:
        if gradient is None:
            self.tensor.grad = None
        else:
            self.tensor.grad = self._view if gradient is self._slot else self._placed(gradient)

    def _pack(self, slot: Any, weight: float) -> bool:
        """See `Parameter._pack`; enqueued in the calling thread's stream, which has waited for the gradient."""
        del weight
        gradient = self.grad
        if gradient is None:
            slot.zero_()
            return False
        if gradient is not slot:  # the user, or another wrapper, has moved it
            slot.copy_(gradient)
            self._streams.keep(gradient)
            self._hold(slot)
        return True

    def _layout(self) -> tuple[np.dtype[Any], int]:
        return self.dtype, prod(self.shape) * self.dtype.itemsize

    def _gradient_values(self) -> NDArray[Any]:
        return values_of(self.grad)

    def _copied_gradient(self) -> Any:
        return self.grad.clone()

    def _add_to_gradient(self, more: Any) -> None:
        self.grad.add_(more)

    def _scale_gradient(self, factor: float) -> None:
        self.grad.mul_(factor)

    def _gradient_power(self, p: float) -> float:
        norm = float(torch.linalg.vector_norm(self.grad, p, dtype=torch.float64))
        try:
            return norm if math.isinf(p) else norm**p
        except OverflowError:
            return math.inf

    def _check_runs(self) -> None:
        if self._streams.captures():
            raise UnsupportedOp(
                "a CUDA graph captures this backward pass, and would run it without the other ranks: capture nothing "
                "in which gradients of a wrapped module are computed"
            )

    def _has_written(self) -> None:
        self.written = self._streams.current()


def _as_tensor(array: NDArray[Any]) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))
