"""Tensors and NumPy arrays over the same memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import UnsupportedOp

__all__ = ["Tensor", "array_of", "nothing", "tensor_of"]

Tensor = Any
"""`torch.Tensor`."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def array_of(tensor: Tensor, name: str = "the tensor") -> NDArray[Any]:
    """A tensor's memory as an array of the same shape and strides; it does not keep the autograd graph alive.

    Args:
        tensor: dense, on the CPU.
        name: for the error.

    Raises:
        UnsupportedOp: it has no memory that NumPy can see.
    """
    plain = tensor.detach()
    if plain.device.type != "cpu" or plain.layout != torch.strided:
        raise UnsupportedOp(f"{name} is a {plain.layout} tensor on {plain.device}: want a dense one on the CPU")
    if plain.dtype == torch.bfloat16:  # NumPy's is ml_dtypes'; torch knows only its bits
        bits: NDArray[Any] = plain.view(torch.int16).numpy()
        return bits.view(_BFLOAT16)
    array: NDArray[Any] = plain.numpy()
    return array


def tensor_of(array: NDArray[Any]) -> Tensor:
    """An array's memory as a tensor, which keeps the array alive; the array must be writable."""
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def nothing(like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of another one, and of one element's memory.

    It stands where values are not here now. It reads as NaN, so that whoever uses it sees it at once; as zeros where
    the dtype has no NaN.
    """
    value = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype).expand(like.shape)
