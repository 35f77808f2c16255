"""Tensors and NumPy arrays over the same memory."""

from __future__ import annotations

import functools
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
    if plain.is_conj() or plain.is_neg():
        raise UnsupportedOp(f"{name} is a lazy conjugate or negative: resolve it first")
    dtype = _dtype_of(plain.dtype)
    array = np.asarray(_Memory(plain, dtype, name)) if plain.numel() else np.empty(tuple(plain.shape), dtype)
    return array.view(_BFLOAT16) if plain.dtype == torch.bfloat16 else array


class _Memory:
    """A tensor's memory as NumPy wants it described.

    `Tensor.numpy` would do, but it fixes the size of the tensor's storage for good, and FSDP1, for one, changes it.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Tensor, dtype: np.dtype[Any], name: str) -> None:
        address = tensor.data_ptr()
        if not address:
            raise UnsupportedOp(f"{name} has no memory now: its storage was freed")
        self._tensor = tensor  # keeps the memory for as long as there is an array over it
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * dtype.itemsize for stride in tensor.stride()),
            "typestr": dtype.str,
            "data": (address, False),
        }


@functools.cache
def _dtype_of(dtype: Any) -> np.dtype[Any]:
    """NumPy's name for the elements of a tensor; for bfloat16, which NumPy itself does not know, that of its bits."""
    if dtype == torch.bfloat16:
        dtype = torch.int16
    found: np.dtype[Any] = torch.empty(0, dtype=dtype).numpy().dtype
    return found


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
