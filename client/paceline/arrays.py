"""Any NumPy array, as collectives handle it: flat, contiguous, in native byte order; and its bytes.

It owns layout and nothing else: what may travel is the table of `signature.py`.

Shapes: N elements in all; B = N * itemsize bytes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.errors import LimitExceeded, SizeMismatch, UnsupportedOp
from paceline.signature import dtype_name

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
"""Copied in about a microsecond; less is not worth the two arrays that copying without the GIL needs."""


def as_array(x: npt.ArrayLike) -> Array:
    """`x` as an array that can travel; no copy of an array.

    Raises:
        UnsupportedOp: its dtype cannot travel.
    """
    array = np.asarray(x)
    dtype_name(array.dtype)
    return array


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in this machine's byte order: that of results."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def as_flat(x: Array) -> Array:
    """The elements in C order and native byte order, shape [N]; a view of `x` where its layout allows, else a copy."""
    if x.dtype.isnative and x.flags.c_contiguous:
        return x.reshape(-1)
    return np.ascontiguousarray(x, native(x.dtype)).reshape(-1)


def as_bytes(flat: Array) -> memoryview:
    """The bytes of a contiguous array of shape [N], shape [B]; through uint8, for bfloat16 has no buffer protocol."""
    return flat.view(np.uint8).data


def from_bytes(data: bytes | memoryview, dtype: np.dtype[Any]) -> Array:
    """The elements that the bytes hold, shape [N]; a read-only view of them."""
    return np.frombuffer(data, dtype)


def copy_bytes(source: bytes | memoryview, target: memoryview) -> None:
    """Copies bytes, shape [B] both. Many of them without the GIL, so that what else this process computes goes on."""
    if len(target) < _GIL_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def check_writable(out: object) -> None:
    """Checks that a result can be put there.

    Raises:
        UnsupportedOp: not an array, or read-only.
    """
    if not isinstance(out, np.ndarray) or not out.flags.writeable:
        raise UnsupportedOp(f"out must be a writable array, not {_describe(out)}")


def check_out(out: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Checks that a result fits the caller's `out`.

    Raises:
        SizeMismatch: another shape.
        UnsupportedOp: another dtype, not an array, or read-only.
    """
    check_writable(out)
    if out.dtype is not dtype and native(out.dtype) != dtype:
        raise UnsupportedOp(f"out has dtype {out.dtype}, the result has {dtype}")
    if out.shape != shape:
        raise SizeMismatch(f"out has shape {out.shape}, the result has {shape}")


def landing(
    out: Array | None, x: Array | None, dtype: np.dtype[Any], shape: tuple[int, ...], *, in_place: bool = False
) -> Array:
    """Where to put a result together: a contiguous, native array of this shape; `out` itself if it will do.

    It will not do if it lies in memory in another way, or if writing it in pieces could change elements of `x` that
    are still to be read.

    Args:
        out: what the caller gave.
        x: what is read meanwhile, if anything.
        dtype: of the result.
        shape: of the result.
        in_place: each element is read before it is written: `out` may be `x`.
    """
    if out is None or not (out.flags.c_contiguous and out.dtype.isnative):
        return new_array(shape, dtype)
    if out is x and in_place and type(out) is np.ndarray:
        return out
    if x is not None and np.may_share_memory(x, out) and not (in_place and same_elements(x, out)):
        return new_array(shape, dtype)
    return out if type(out) is np.ndarray else out.view(np.ndarray)


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new array whose size another member may have announced.

    Raises:
        LimitExceeded: there is no memory for it.
    """
    try:
        return np.empty(shape, dtype)
    except MemoryError:
        raise LimitExceeded(f"there is no memory here for an array of shape {shape} and dtype {dtype}") from None


def same_elements(x: Array, out: Array) -> bool:
    """True if the two are the same elements in the same places of memory."""
    if x is out:
        return True
    same = x.ctypes.data == out.ctypes.data and x.shape == out.shape and x.strides == out.strides
    return same and x.dtype == out.dtype


def deliver(result: Array, out: Array | None) -> Array:
    """The result, in `out` if the caller gave one."""
    if out is None or result is out:
        return result
    if same_elements(result, out):  # a subclass of arrays
        return out
    out[...] = result
    return out


def _describe(out: object) -> str:
    return "a read-only one" if isinstance(out, np.ndarray) else type(out).__name__
