"""Arrays in one safetensors file, with checked lengths; every dtype that travels, bfloat16 and complex ones too.

Source: the safetensors format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["decode_arrays", "encode_arrays"]

_DTYPES = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
_PAIRS = "complex128"
"""Key of the file's metadata: names of arrays stored as pairs of float64, for the format has no such type."""


def encode_arrays(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of a safetensors file."""
    from safetensors import TensorSpec, serialize  # here, because not every job keeps checkpoints

    kept = []  # the specs hold addresses
    specs = {}
    pairs = [name for name, array in arrays.items() if array.dtype.name == "complex128"]
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        shape = array.shape
        if name in pairs:
            flat, shape = flat.view(np.float64), (*shape, 2)
        kept.append(flat)
        specs[name] = TensorSpec(
            dtype=flat.dtype.name,
            shape=shape,
            data_ptr=flat.ctypes.data,
            data_len=flat.nbytes,
        )
    return bytes(serialize(specs, metadata={_PAIRS: json.dumps(pairs)}))


def decode_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file, writable.

    Raises:
        ValueError: it is none, or holds a type that Paceline does not write.
    """
    from safetensors import SafetensorError, deserialize

    arrays: dict[str, NDArray[Any]] = {}
    try:
        entries = deserialize(data)  # type: ignore[no-untyped-call]  # checks every length
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        pairs = set(json.loads(header["__metadata__"][_PAIRS]))
        for name, entry in entries:
            dtype = np.dtype(ml_dtypes.bfloat16) if entry["dtype"] == "BF16" else np.dtype(_DTYPES[entry["dtype"]])
            array = np.frombuffer(bytearray(entry["data"]), dtype).reshape(entry["shape"])
            arrays[name] = array.view(np.complex128).reshape(array.shape[:-1]) if name in pairs else array
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no safetensors file that Paceline wrote: {error}") from error
    return arrays
