"""Arrays in collectives: their layout and bytes, their descriptions as text, and the memory of frames.

Any NumPy array travels as a flat, contiguous one in native byte order. Shapes: N elements in all; B = N * itemsize
bytes.

**Signatures** describe operations. Members compare them before they trust each other's bytes. Here is their text form,
and the parser that turns it back into a dtype and a shape with checks. Nothing is evaluated (I9): dtypes come from a
table and numbers from digits, and both are limited.

    all_reduce op=sum float32[1024,3]        kind, detail, dtype, shape
    barrier                                  no array is sent

**Memory.** Every frame of 1 MiB is allocated and freed several times on its way through grpc. By default malloc maps
and unmaps each, or grows and trims the heap, and the kernel zeroes the pages anew: a 16 MiB all_reduce at W=2 took
27 ms instead of 16. Whether that happens depends on what the process freed before, because malloc adapts its thresholds
(mallopt(3)). Here they are set to the values that they would have after freeing one array of 16 MiB.
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.errors import LimitExceeded, SizeMismatch, UnsupportedOp

MAX_SIGNATURE_BYTES = 1024
"""Longest signature, as text."""

MAX_DIMENSIONS = 32
"""Most dimensions of an array that can be sent: 32 numbers of 20 digits fit a signature."""

MAX_ARRAY_BYTES = 1 << 44
"""Largest array that a signature may announce: 16 TiB, so that sums of lengths stay far from 64 bits."""

_NAMES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NAMES}
_TEXT = re.compile(
    r"([a-z_]+)((?: [a-z_]+=[\w-]+)*)(?: ([a-z]+[0-9]*)\[((?:[0-9]{1,15}(?:,[0-9]{1,15})*)?)\])?", re.ASCII
)


class Signature(NamedTuple):
    """A description of an operation: its kind, its arguments ("op=sum"), and the dtype and shape of its array.

    Dtype and shape are None if no array is sent, or if the sender decides.
    """

    kind: str
    detail: str = ""
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None

    def encode(self) -> bytes:
        """Returns the text form; raises UnsupportedOp or LimitExceeded if such an array cannot be sent."""
        return _encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Signature:
        """Parses the text form, which came from the network; raises ValueError if it is none, or exceeds a limit."""
        match = _TEXT.fullmatch(data.decode("ascii")) if len(data) <= MAX_SIGNATURE_BYTES else None
        if match is None:
            raise ValueError(f"not a signature: {data[:80]!r}")
        kind, detail, name, sizes = match.groups()
        if name is None:
            return cls(kind, detail[1:])
        dtype = _dtype(name)
        shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
        if dtype is None or len(shape) > MAX_DIMENSIONS or _bytes(shape, dtype) > MAX_ARRAY_BYTES:
            raise ValueError(f"a signature that announces an impossible array: {data[:80]!r}")
        return cls(kind, detail[1:], dtype, shape)

    def __str__(self) -> str:
        head = f"{self.kind} {self.detail}" if self.detail else self.kind
        if self.dtype is None or self.shape is None:
            return head
        return f"{head} {dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns a dtype's name in signatures; UnsupportedOp for objects, text, dates, records and long double."""
    name = dtype.name
    if _dtype(name) is None:
        raise UnsupportedOp(f"arrays of dtype {dtype} cannot be sent; these can: {', '.join(_NAMES)}, bfloat16")
    return name


def dtype_named(name: str) -> np.dtype[Any]:
    """Returns the dtype that has a name in signatures; raises ValueError if there is none."""
    dtype = _dtype(name)
    if dtype is None:
        raise ValueError(f"there is no dtype {name!r:.40}")
    return dtype


@lru_cache(maxsize=1024)
def _encode(signature: Signature) -> bytes:
    dtype, shape = signature.dtype, signature.shape
    if dtype is not None and shape is not None:
        if len(shape) > MAX_DIMENSIONS:
            raise LimitExceeded(f"an array of {len(shape)} dimensions cannot be sent: the limit is {MAX_DIMENSIONS}")
        if _bytes(shape, dtype) > MAX_ARRAY_BYTES:
            raise LimitExceeded(f"an array of shape {shape} cannot be sent: the limit is {MAX_ARRAY_BYTES} bytes")
    return str(signature).encode("ascii")


def _bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Returns the array's size in bytes, without dimensions of 0: NumPy limits the product of the others too."""
    return prod(filter(None, shape)) * dtype.itemsize


def _dtype(name: str) -> np.dtype[Any] | None:
    if name == "bfloat16":
        import ml_dtypes  # imported here because it takes time and few jobs need it

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return _DTYPES.get(name)


Array: TypeAlias = npt.NDArray[Any]

_GIL_BYTES = 32 << 10
"""Bytes that are copied in about a microsecond; for fewer, the two arrays that copying without the GIL needs cost more
than they save."""


def as_array(x: npt.ArrayLike) -> Array:
    """Returns `x` as an array, without a copy if it is one; raises UnsupportedOp if its dtype cannot be sent."""
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
    """Checks that `out` can take a result; raises UnsupportedOp if it is no array, or read-only."""
    if not isinstance(out, np.ndarray) or not out.flags.writeable:
        raise UnsupportedOp(f"out must be a writable array, not {_describe(out)}")


def check_out(out: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Checks that a result fits the caller's `out`.

    Raises SizeMismatch for another shape, and UnsupportedOp for another dtype or what `check_writable` refuses.
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

    `out` is not possible if its layout differs, or if writing parts of it could change elements of the input `x` that
    are still to be read. With `in_place` each element is read before it is written, so `out` may be `x`.
    """
    if out is None or not (out.flags.c_contiguous and out.dtype.isnative):
        return new_array(shape, dtype)
    if out is x and in_place and type(out) is np.ndarray:
        return out
    if x is not None and np.may_share_memory(x, out) and not (in_place and same_elements(x, out)):
        return new_array(shape, dtype)
    return out if type(out) is np.ndarray else out.view(np.ndarray)


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns a new array, whose size may come from another member; raises LimitExceeded if memory is short."""
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


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_BYTES = 16 << 20
_TRIM_BYTES = 32 << 20
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_frame_memory() -> bool:
    """Sets the thresholds for this process: up to 32 MiB of free memory stay with it.

    Returns False if nothing was changed: the user has set thresholds, or the C library has no `mallopt`.
    """
    if any(name in os.environ for name in _USERS_OWN) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
