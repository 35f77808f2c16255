"""Tensors as arrays of the same memory, and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import UnsupportedOp

__all__ = ["array_of", "tensor_of"]

Tensor = Any
"""`torch.Tensor`."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def array_of(tensor: Tensor) -> NDArray[Any]:
    """The memory of a dense tensor on the CPU as an array of the same shape and strides.

    Raises:
        UnsupportedOp: it is on another device, or not dense.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise UnsupportedOp(f"want a dense tensor on the CPU, not one on {tensor.device}, {tensor.layout}")
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:  # which NumPy has from ml_dtypes, and torch does not know of that
        return tensor.view(torch.int16).numpy().view(_BFLOAT16)  # type: ignore[no-any-return]
    return tensor.numpy()  # type: ignore[no-any-return]


def tensor_of(array: NDArray[Any]) -> Tensor:
    """The same memory as a tensor; the array must be writable."""
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
