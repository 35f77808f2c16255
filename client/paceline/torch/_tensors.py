"""Conversion between torch tensors and NumPy arrays over the same memory; copies only where the layout requires it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from paceline._base.arrays import Array
from paceline.errors import UnsupportedOp

Tensor = Any
"""`torch.Tensor`."""

KeyT = TypeVar("KeyT")

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_COMBINABLE = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


def array_of(tensor: Tensor, name: str = "the tensor") -> NDArray[Any]:
    """Returns an array over the memory of a dense tensor on the CPU, with its strides, without its autograd graph."""
    plain = tensor.detach()
    if plain.device.type != "cpu" or plain.layout != torch.strided:
        raise UnsupportedOp(f"{name} is a {plain.layout} tensor on {plain.device}: want a dense one on the CPU")
    if plain.is_conj() or plain.is_neg():
        raise UnsupportedOp(f"{name} is a lazy conjugate or negative: resolve it first")
    dtype = _dtype_of(plain.dtype)
    array = np.asarray(_TensorMemory(plain, dtype, name)) if plain.numel() else np.empty(tuple(plain.shape), dtype)
    return array.view(_BFLOAT16) if plain.dtype == torch.bfloat16 else array


class _TensorMemory:
    """A tensor's memory, described as NumPy's array interface wants it.

    `Tensor.numpy` is not used because it makes the tensor's storage unresizable for good, and torch's FSDP1, for
    example, resizes it.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Tensor, dtype: np.dtype[Any], name: str) -> None:
        address = tensor.data_ptr()
        if not address:
            raise UnsupportedOp(f"{name} has no memory now: its storage was freed")
        self._tensor = tensor  # keeps the memory alive while there is an array over it
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * dtype.itemsize for stride in tensor.stride()),
            "typestr": dtype.str,
            "data": (address, False),
        }


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns NumPy's dtype for a torch dtype."""
    return _BFLOAT16 if dtype == torch.bfloat16 else _dtype_of(dtype)


@functools.cache
def _dtype_of(dtype: Any) -> np.dtype[Any]:
    """Returns NumPy's dtype for a torch dtype; int16 for bfloat16, which NumPy itself does not have."""
    if dtype == torch.bfloat16:
        dtype = torch.int16
    found: np.dtype[Any] = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return found


def torch_dtype(dtype: np.dtype[Any]) -> Any:
    """Returns torch's dtype for a NumPy dtype."""
    return tensor_of(np.empty(0, dtype)).dtype


def tensor_of(array: NDArray[Any]) -> Tensor:
    """Returns a tensor over an array's memory, which it keeps alive; the array must be writable."""
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def placeholder_like(like: Tensor) -> Tensor:
    """Returns a placeholder with the shape and dtype of a tensor, and the memory of one element.

    It takes the place of a tensor whose values are not in memory now. It reads as NaN, so that mistaken uses are
    noticed, or as zeros if the dtype has no NaN.
    """
    value = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


def can_combine(dtype: Any) -> bool:
    """Returns True if elements of this torch dtype can be summed, compared and so on, not only moved."""
    return dtype in _COMBINABLE


def on_host(tensor: Tensor) -> bool:
    """Returns True if a tensor lies in memory that NumPy can view."""
    return bool(tensor.device.type == "cpu")


def values_of(tensor: Tensor, name: str = "the tensor") -> NDArray[Any]:
    """Returns a tensor's values: `array_of` on the CPU, and a copy if the tensor lies on a device.

    The copy is not pinned, since torch keeps pinned memory for ever.
    """
    if on_host(tensor) or tensor.is_meta:  # which has no values: an error
        return array_of(tensor, name)
    return array_of(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach()), name)


def values_of_all(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Returns `values_of` some dense tensors. Those on a device are copied together, so that the host waits once."""
    found = {place: array_of(tensor) for place, tensor in enumerate(tensors) if on_host(tensor)}
    for places in _alike(dict(enumerate(tensors))):
        whole = torch.cat([tensors[place].detach().reshape(-1) for place in places])
        ends = np.cumsum([tensors[place].numel() for place in places])
        for place, part in zip(places, np.split(array_of(_staging(whole).copy_(whole)), ends[:-1]), strict=True):
            found[place] = part.reshape(tuple(tensors[place].shape))
    return [found[place] for place in range(len(tensors))]


def write_all(tensors: Mapping[str, Tensor], values: Mapping[str, NDArray[Any]]) -> None:
    """Writes values that `values_of` has copied from devices, all of a device and dtype with one copy to it."""
    for paths in _alike(tensors):
        whole = torch.cat([tensor_of(np.ascontiguousarray(values[path])).reshape(-1) for path in paths])
        there = torch.empty_like(whole, device=tensors[paths[0]].device).copy_(whole)
        with torch.no_grad():
            for path, part in zip(paths, there.split([tensors[path].numel() for path in paths]), strict=True):
                tensors[path].copy_(part.view(tensors[path].shape))


def _alike(tensors: Mapping[KeyT, Tensor]) -> list[list[KeyT]]:
    """Returns the keys of tensors on a device, grouped by device and dtype."""
    found: dict[tuple[Any, Any], list[KeyT]] = {}
    for key, tensor in tensors.items():
        if not on_host(tensor):
            found.setdefault((tensor.device, tensor.dtype), []).append(key)
    return list(found.values())


def elements_of(tensor: Tensor) -> Array:
    """Returns a tensor's elements in C order, shape [N]: a view if the tensor is contiguous on the CPU, else a copy.

    A tensor that `can_combine` rejects is returned as its bytes: shape [N * itemsize], uint8. Sparse and quantized
    tensors are refused.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedOp(f"a tensor of layout {tensor.layout} cannot be sent: convert it to a dense one")
    flat = tensor.detach()
    if not on_host(flat):
        flat = _staging(flat).copy_(flat)  # the copy waits for the CUDA stream
    flat = flat.resolve_conj().resolve_neg().contiguous().view(-1)
    return array_of(flat if can_combine(flat.dtype) else flat.view(torch.uint8))


class ResultBuffer(NamedTuple):
    """The memory, shape [N], to which an operation writes its result for a tensor.

    `copy_back` copies the result to the tensor; None if `array` is the tensor's own memory.
    """

    array: Array
    copy_back: Callable[[], None] | None


def result_buffer(tensor: Tensor, *, filled: bool = False) -> ResultBuffer:
    """Returns a buffer for a result that belongs in a dense tensor: the tensor's own memory if possible.

    For operations in place, a `filled` buffer has the tensor's values.
    """
    plain = on_host(tensor) and not (tensor.is_conj() or tensor.is_neg())
    if plain and tensor.layout == torch.strided and tensor.is_contiguous():
        return ResultBuffer(elements_of(tensor), None)
    staging = _staging(tensor)
    if filled:
        staging.copy_(tensor.detach())

    def copy_back() -> None:
        with torch.no_grad():
            tensor.detach().copy_(staging)

    return ResultBuffer(elements_of(staging), copy_back)


def _staging(tensor: Tensor) -> Tensor:
    """Returns an uninitialised contiguous CPU tensor of the same shape and dtype; pinned if the tensor is on a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
