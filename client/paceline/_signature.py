"""Signatures: descriptions of operations, which members compare before they trust each other's bytes.

This module defines their text form, and parses it back to a dtype and a shape with checks. Nothing is evaluated (I9):
dtypes come from a table and numbers from digits, and both are limited.

    all_reduce op=sum float32[1024,3]        kind, detail, dtype, shape
    barrier                                  no array is sent
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import LimitExceeded, UnsupportedOp

__all__ = ["MAX_ARRAY_BYTES", "MAX_DIMENSIONS", "MAX_SIGNATURE_BYTES", "Signature", "dtype_name", "dtype_named"]

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
    """A description of an operation.

    Attributes:
        kind: the operation's name: "all_reduce", "send", ...
        detail: its arguments, "op=sum"; empty for none.
        dtype: the array's dtype; None if no array is sent, or if the sender decides.
        shape: the array's shape; None if `dtype` is None.
    """

    kind: str
    detail: str = ""
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None

    def encode(self) -> bytes:
        """Returns the text form, at most `MAX_SIGNATURE_BYTES` long.

        Raises:
            UnsupportedOp: the dtype cannot be sent.
            LimitExceeded: the array has too many dimensions, or is too large.
        """
        return _encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Signature:
        """Parses the text form, which came from the network.

        Raises:
            ValueError: the bytes are no signature, or exceed a limit.
        """
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
    """Returns the name of a dtype in signatures.

    Raises:
        UnsupportedOp: the dtype cannot be sent: objects, text, dates, records, long double.
    """
    name = dtype.name
    if _dtype(name) is None:
        raise UnsupportedOp(f"arrays of dtype {dtype} cannot be sent; these can: {', '.join(_NAMES)}, bfloat16")
    return name


def dtype_named(name: str) -> np.dtype[Any]:
    """Returns the dtype that has a name in signatures.

    Raises:
        ValueError: there is none.
    """
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
