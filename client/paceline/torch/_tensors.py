"""Tensors and NumPy arrays over the same memory; nothing is copied where the layout allows.

`array_of` and `tensor_of` see the same memory as the other kind. `elements_of` and `landing` are for operations: the
elements of any tensor, and where a result goes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from paceline.arrays import Array
from paceline.errors import UnsupportedOp

__all__ = ["Landing", "Tensor", "array_of", "elements_of", "is_number", "landing", "nothing", "tensor_of"]


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


_KNOWN = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


class Landing(NamedTuple):
    """Where the result of an operation goes.

    Attributes:
        array: NumPy's view of it, shape [N].
        finish: brings it to the tensor, if it is not the tensor's own memory.
    """

    array: Array
    finish: Callable[[], None] | None


def is_number(dtype: Any) -> bool:
    """True if NumPy knows the type, bfloat16 included: its elements can be combined."""
    return dtype in _KNOWN or dtype == torch.bfloat16


def elements_of(tensor: Any) -> Array:
    """The elements in C order, shape [N]: a view of a contiguous tensor on the CPU, else of a copy.

    What NumPy has no type for comes as its bytes, shape [N * itemsize], uint8: it can be moved, not added up.

    Raises:
        UnsupportedOp: a sparse or quantized tensor.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedOp(f"a tensor of layout {tensor.layout} cannot travel as it is: give a dense one")
    flat = tensor.detach()
    if flat.is_cuda:
        flat = _staged(flat).copy_(flat)  # which waits for the stream
    flat = flat.resolve_conj().resolve_neg().contiguous().view(-1)
    return array_of(flat if is_number(flat.dtype) else flat.view(torch.uint8))


def landing(tensor: Any, *, filled: bool = False) -> Landing:
    """Where a result goes that is to be in this tensor.

    Args:
        tensor: dense.
        filled: the operation begins with the tensor's values (in place).
    """
    plain = not (tensor.is_cuda or tensor.is_conj() or tensor.is_neg())
    if plain and tensor.layout == torch.strided and tensor.is_contiguous():
        return Landing(elements_of(tensor), None)
    stage = _staged(tensor)
    if filled:
        stage.copy_(tensor.detach())

    def finish() -> None:
        with torch.no_grad():
            tensor.detach().copy_(stage)

    return Landing(elements_of(stage), finish)


def _staged(tensor: Any) -> Any:
    """A contiguous tensor on the CPU, of the same shape and dtype; in pinned memory for a tensor of a GPU.

    What concerns GPUs is untested, for none was at hand. Where there are some, NCCL is what to use.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
