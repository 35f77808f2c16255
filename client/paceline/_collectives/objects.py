"""Encodes Python objects as bytes and back, for the collectives that send objects. No pickle, no evaluation (I9).

This module defines the encoding and the types that it supports; it does not send anything. A value is a tag of one
byte, a number of 8 bytes (big-endian), and what the tag says:

    N T F    None, True, False         number: 0
    i f s b  int, float, str, bytes    number: of bytes; two's complement, IEEE 754 (both big-endian), UTF-8, as is
    l t d    list, tuple, dict         number: of items; the items, or each key followed by its value
    a        NumPy array or scalar     number: of bytes of its signature, "array float32[2,3]"; then its elements

This is not msgpack, because msgpack allocates an announced length at each level of nesting (hundreds of times the
input), and exact types, paths, depth, big ints and more than 4 GiB would all have to be built around it.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any

import numpy as np

from paceline._base.arrays import Array, Signature, as_bytes, as_flat, from_bytes
from paceline.errors import LimitExceeded, UnsupportedOp

MAX_DEPTH = 64
"""Most containers around a value; far below what the interpreter's stack allows."""

_HEADER = struct.Struct(">cQ")
_FLOAT = struct.Struct(">d")
_CONSTANTS: dict[bytes, bool | None] = {b"N": None, b"T": True, b"F": False}
_IN_KEY = object()
_SUPPORTED = (
    "the supported types are None, bool, int, float, str, bytes, list, tuple, dict, NumPy arrays and NumPy "
    "scalars, but no subclass of these"
)


def encode_object(o: object) -> bytes:
    """Encodes an object.

    The decoded object is equal and has the same types: tuples stay tuples, dicts keep their order, floats and text keep
    every bit (NaN, -0.0, lone surrogates). Arrays become contiguous and have native byte order; shared objects become
    copies.

    Raises:
        UnsupportedOp: the object contains another type; the text names the type and the path to it.
        LimitExceeded: containers are nested deeper than `MAX_DEPTH`, as one that contains itself is, or an array is too
            large to be sent.
    """
    writer = _Writer()
    writer.value(o)
    return b"".join(writer.parts)


def decode_object(data: bytes | memoryview) -> Any:
    """Decodes bytes from the network, or raises ValueError; the object's arrays are writable and own their memory.

    It allocates at most about 16 times `len(data)` (for a list of tiny dicts), whatever lengths the bytes announce.
    """
    reader = _Reader(memoryview(data).cast("B"))
    with np.errstate(all="ignore"):  # comparing keys may overflow a float16
        o = reader.value(0)
    if len(reader.left):
        raise ValueError(f"{len(reader.left)} extra bytes after an encoded object")
    return o


class _Writer:
    """Collects the pieces of an encoding, and keeps the path to the current value."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self.path: list[object] = []

    def value(self, o: object) -> None:
        # `type(o) is`, because a subclass would silently arrive as its base.
        if len(self.path) > MAX_DEPTH:
            raise LimitExceeded(
                f"cannot send an object with more than {MAX_DEPTH} nested containers{self.where()}: "
                "does one of them contain itself?"
            )
        if o is None or type(o) is bool:
            self.put(b"N" if o is None else b"T" if o else b"F", b"")
        elif type(o) is int:
            self.put(b"i", o.to_bytes(o.bit_length() // 8 + 1, "big", signed=True))
        elif type(o) is float:
            self.put(b"f", _FLOAT.pack(o))
        elif type(o) is str:
            self.put(b"s", o.encode("utf-8", "surrogatepass"))  # file names may hold lone surrogates
        elif type(o) is bytes:
            self.put(b"b", o)
        elif type(o) is list or type(o) is tuple:
            self.parts.append(_HEADER.pack(b"l" if type(o) is list else b"t", len(o)))
            for index, item in enumerate(o):
                self.inside(index, item)
        elif type(o) is dict:
            self.parts.append(_HEADER.pack(b"d", len(o)))
            for key, item in o.items():
                self.inside(_IN_KEY, key)
                self.inside(key, item)
        elif type(o) is np.ndarray:
            self.array("array", o)
        elif isinstance(o, np.generic) and type(o) is o.dtype.type:
            self.array("scalar", np.asarray(o))
        else:
            raise UnsupportedOp(f"cannot send a {_name(type(o))}{self.where()}: {_SUPPORTED}")

    def inside(self, step: object, o: object) -> None:
        self.path.append(step)
        self.value(o)
        self.path.pop()

    def array(self, kind: str, array: Array) -> None:
        try:
            self.put(b"a", Signature(kind, "", array.dtype, array.shape).encode())
        except (UnsupportedOp, LimitExceeded) as error:
            what = _name(array.dtype.type if kind == "scalar" else np.ndarray)
            raise type(error)(f"cannot send a {what}{self.where()}: {error}") from None
        self.parts.append(as_bytes(as_flat(array)))

    def put(self, tag: bytes, data: bytes) -> None:
        self.parts += (_HEADER.pack(tag, len(data)), data)

    def where(self) -> str:
        """Returns the path to the current value, ` (at ['config'][2])`; empty for the object itself."""
        path = "".join("<key>" if step is _IN_KEY else f"[{_brief(step)}]" for step in self.path)
        return f" (at {path if len(path) <= 200 else f'{path[:100]}...{path[-100:]}'})" if path else ""


class _Reader:
    """Reads values from an encoding; `left` is the part that has not been read."""

    def __init__(self, data: memoryview) -> None:
        self.left = data

    def take(self, n: int) -> memoryview:
        if n > len(self.left):
            raise ValueError(f"an encoded object ends too soon: {n} bytes expected, {len(self.left)} left")
        taken, self.left = self.left[:n], self.left[n:]
        return taken

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"an encoded object has more than {MAX_DEPTH} nested containers")
        tag, n = _HEADER.unpack(self.take(_HEADER.size))
        if tag in _CONSTANTS and n == 0:
            return _CONSTANTS[tag]
        if tag == b"i":
            return int.from_bytes(self.take(n), "big", signed=True)
        if tag == b"f" and n == _FLOAT.size:
            return _FLOAT.unpack(self.take(n))[0]
        if tag == b"s":
            return str(self.take(n), "utf-8", "surrogatepass")
        if tag == b"b":
            return bytes(self.take(n))
        if tag == b"l":
            return self.items(n, depth)
        if tag == b"t":
            return tuple(self.items(n, depth))
        if tag == b"d":
            return self.mapping(n, depth)
        if tag == b"a":
            return self.array(n)
        raise ValueError(f"no encoded value begins with tag {tag!r} and number {n}")

    def items(self, n: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(n)]  # grows with the bytes present, not with the announced length

    def mapping(self, n: int, depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for _ in range(n):
            key, value = self.value(depth + 1), self.value(depth + 1)
            try:
                twice = key in result
                result[key] = value
            except (TypeError, ArithmeticError) as error:  # unhashable; NumPy cannot compare np.float64 and 10**400
                raise ValueError(f"an encoded dict has an impossible key: {error}") from None
            if twice:
                raise ValueError("an encoded dict has the same key twice")
        return result

    def array(self, n: int) -> Any:
        kind, detail, dtype, shape = Signature.decode(bytes(self.take(n)))
        if dtype is None or shape is None or detail or kind not in ("array", "scalar") or (shape and kind == "scalar"):
            raise ValueError(f"an encoded array has a signature of the wrong kind: {kind}")
        raw = self.take(prod(shape) * dtype.itemsize)
        if dtype == np.bool_ and from_bytes(raw, np.dtype(np.uint8)).max(initial=0) > 1:
            raise ValueError("an encoded bool is neither 0 nor 1")  # NumPy would compute nonsense with it
        array = from_bytes(raw, dtype).reshape(shape).copy()
        return array if kind == "array" else array[()]


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _brief(key: object) -> str:
    try:
        return repr(key)
    except ValueError:  # Python refuses to write ints of thousands of digits
        return f"<{_name(type(key))}>"
