"""The layout of arrays in collectives: any NumPy array as a flat, contiguous one in native byte order; and its bytes.

The table in `_signature.py` says which dtypes can be sent.

Shapes: N elements in all; B = N * itemsize bytes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline._signature import dtype_name
from paceline.errors import LimitExceeded, SizeMismatch, UnsupportedOp

__all__ = [
    "Array",
    "as_array",
    "as_bytes",
    "as_flat",
    "check_out",
    "check_writable",
    "copy_bytes",
    "deliver",
    "from_bytes",
    "landing",
    "native",
    "new_array",
    "same_elements",
]

Array: TypeAlias = npt.NDArray[Any]

_GIL_BYTES = 32 << 10
"""Bytes that are copied in about a microsecond; for fewer, the two arrays that copying without the GIL needs cost more
than they save."""


def as_array(x: npt.ArrayLike) -> Array:
    """Returns `x` as an array whose dtype can be sent; an array is not copied.

    Raises:
        UnsupportedOp: the dtype cannot be sent.
    """
    array = np.asarray(x)
    dtype_name(array.dtype)
    return array


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in this machine's byte order, which results have."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def as_flat(x: Array) -> Array:
    """Returns the elements in C order and native byte order, shape [N]; a view if the layout allows, or a copy."""
    if x.dtype.isnative and x.flags.c_contiguous:
        return x.reshape(-1)
    return np.ascontiguousarray(x, native(x.dtype)).reshape(-1)


def as_bytes(flat: Array) -> memoryview:
    """Returns the bytes, shape [B], of a contiguous array [N]; by way of uint8: bfloat16 has no buffer protocol."""
    return flat.view(np.uint8).data


def from_bytes(data: bytes | memoryview, dtype: np.dtype[Any]) -> Array:
    """Returns a read-only view of bytes as elements, shape [N]."""
    return np.frombuffer(data, dtype)


def copy_bytes(source: bytes | memoryview, target: memoryview) -> None:
    """Copies bytes, shape [B] both; large copies release the GIL, so that other threads of this process go on."""
    if len(target) < _GIL_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def check_writable(out: object) -> None:
    """Checks that `out` can take a result.

    Raises:
        UnsupportedOp: `out` is no array, or read-only.
    """
    if not isinstance(out, np.ndarray) or not out.flags.writeable:
        raise UnsupportedOp(f"out must be a writable array, not {_describe(out)}")


def check_out(out: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Checks that a result fits the caller's `out`.

    Raises:
        SizeMismatch: `out` has another shape.
        UnsupportedOp: `out` has another dtype, is no array, or is read-only.
    """
    check_writable(out)
    if out.dtype is not dtype and native(out.dtype) != dtype:
        raise UnsupportedOp(f"out has dtype {out.dtype}, the result has {dtype}")
    if out.shape != shape:
        raise SizeMismatch(f"out has shape {out.shape}, the result has {shape}")


def landing(
    out: Array | None, x: Array | None, dtype: np.dtype[Any], shape: tuple[int, ...], *, in_place: bool = False
) -> Array:
    """Returns a contiguous, native array of this shape to write a result to: `out` itself if possible, or a new one.

    `out` is not possible if its layout differs, or if writing parts of it could change elements of `x` that are still
    to be read.

    Args:
        out: the caller's array, or None.
        x: the input that is read meanwhile, or None.
        dtype: the result's dtype.
        shape: the result's shape.
        in_place: each element is read before it is written, so `out` may be `x`.
    """
    if out is None or not (out.flags.c_contiguous and out.dtype.isnative):
        return new_array(shape, dtype)
    if out is x and in_place and type(out) is np.ndarray:
        return out
    if x is not None and np.may_share_memory(x, out) and not (in_place and same_elements(x, out)):
        return new_array(shape, dtype)
    return out if type(out) is np.ndarray else out.view(np.ndarray)


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns a new array; its size may come from another member.

    Raises:
        LimitExceeded: there is not enough memory.
    """
    try:
        return np.empty(shape, dtype)
    except MemoryError:
        raise LimitExceeded(
            f"there is not enough memory here for an array of shape {shape} and dtype {dtype}"
        ) from None


def same_elements(x: Array, out: Array) -> bool:
    """Returns True if both arrays consist of the same memory, with the same shape, strides and dtype."""
    if x is out:
        return True
    same = x.ctypes.data == out.ctypes.data and x.shape == out.shape and x.strides == out.strides
    return same and x.dtype == out.dtype


def deliver(result: Array, out: Array | None) -> Array:
    """Returns the result; copies it to `out` first if the caller gave one, and returns that."""
    if out is None or result is out:
        return result
    if same_elements(result, out):  # `out` is of a subclass of ndarray
        return out
    out[...] = result
    return out


def _describe(out: object) -> str:
    return "a read-only one" if isinstance(out, np.ndarray) else type(out).__name__
