"""One part of a checkpoint: a safetensors file that one rank writes, and what the manifest says about it. No I/O.

Only the manifest says where data lies, and it does so by order: pieces lie one after the other behind the file's
header, so they can neither overlap nor leave a gap (`index_of`). The header is for other programs: in it, a piece is a
tensor named by the path of its array. It has the array's shape if it is the whole array, and is flat otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from paceline._base.arrays import MAX_ARRAY_BYTES, MAX_DIMENSIONS, dtype_name, dtype_named
from paceline.checkpoint.pieces import Piece

CHUNK_BYTES = 1 << 20
"""Bytes under one checksum. A range is read in whole chunks, so at most two of them are read in part for nothing."""

_MAX_PARTS = 1 << 16

_ALIGNMENT = 4096
"""Data begins at a multiple of this, a page of the file."""

_TENSOR_TYPES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip


class PieceEntry(NamedTuple):
    """A piece without its values: `elements` in C order from `start` on, of the array at `path`, whose shape it has."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    elements: int

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the elements."""
        return self.elements * int(dtype_named(self.dtype).itemsize)


@dataclass(frozen=True)
class Part:
    """The manifest's entry of one file, of `parts` files.

    `header` is the number of bytes before the first piece; `entries` has the pieces in the order of the file.
    `checksums` are the CRC-32 of each chunk of the file, the header's among them, in 8 hexadecimal digits each.
    """

    number: int
    parts: int
    header: int
    entries: tuple[PieceEntry, ...]
    checksums: str

    @property
    def name(self) -> str:
        """Name of the file."""
        return part_name(self.number, self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.header + sum(entry.nbytes for entry in self.entries)

    @property
    def chunks(self) -> int:
        """Number of chunks; the last may be shorter."""
        return -(-self.nbytes // CHUNK_BYTES)

    def checksum(self, chunk: int) -> int:
        """Returns the CRC-32 of a chunk."""
        return int(self.checksums[8 * chunk : 8 * chunk + 8], 16)

    def places(self) -> Iterator[tuple[PieceEntry, int]]:
        """Yields each piece with the position of its first byte in the file."""
        offset = self.header
        for entry in self.entries:
            yield entry, offset
            offset += entry.nbytes

    def to_tree(self) -> dict[str, Any]:
        """Returns the part as plain values, for JSON and for `Group.gather_object`."""
        entries = [[*entry[:2], list(entry.shape), *entry[3:]] for entry in self.entries]
        return {
            "part": [self.number, self.parts],
            "header": self.header,
            "bytes": self.nbytes,
            "pieces": entries,
            "crc32": self.checksums,
        }

    @classmethod
    def from_tree(cls, tree: Any) -> Part:
        """Reads what `to_tree` returned, from a file or another rank (I9); a ValueError says why it is malformed."""
        try:
            number, parts = (_whole(n, _MAX_PARTS) for n in tree["part"])
            entries = tuple(_entry_from(entry) for entry in tree["pieces"])
            part = cls(number, parts, _whole(tree["header"]), entries, str(tree["crc32"]))
            size = _whole(tree["bytes"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a part of a checkpoint: {type(error).__name__}: {error!s:.200}") from error
        if number >= parts or part.nbytes != size:
            raise ValueError(f"part {number} of {parts} has pieces of {part.nbytes} bytes in a file of {size}")
        if len({entry.path for entry in entries}) < len(entries):
            raise ValueError(f"{part.name} has two pieces of one array")
        digits = part.checksums
        if len(digits) != 8 * part.chunks or not set(digits) <= set("0123456789abcdef"):
            raise ValueError(f"{part.name} of {size} bytes has {len(digits)} digits of checksums")
        return part


def part_name(number: int, parts: int) -> str:
    """Returns the name of a part's file. An unsharded checkpoint has one part."""
    return "arrays.safetensors" if parts == 1 else f"arrays-{number:05d}-of-{parts:05d}.safetensors"


def entry_of(piece: Piece) -> PieceEntry:
    """Returns the piece's entry for the manifest."""
    return PieceEntry(piece.path, dtype_name(piece.values.dtype), piece.shape, piece.start, piece.values.size)


def header_of(entries: Sequence[PieceEntry], number: int, parts: int) -> bytes:
    """Makes the start of a safetensors file: the length of the rest in 8 bytes, then JSON, and spaces up to a page."""
    fields: dict[str, Any] = {"__metadata__": {"writer": "paceline", "part": f"{number} of {parts}"}}
    offset = 0
    for entry in entries:
        shape = list(entry.shape) if entry.elements == prod(entry.shape) else [entry.elements]
        kind = entry.dtype
        if kind == "complex128":  # the format has no such type: stored as pairs of real and imaginary parts
            kind, shape = "float64", [*shape, 2]
        name = entry.path
        while name in fields:
            name += "'"
        end = offset + entry.nbytes
        fields[name] = {"dtype": _TENSOR_TYPES[kind], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _entry_from(entry: Any) -> PieceEntry:
    path, dtype, shape, start, elements = entry
    if type(path) is not str or type(dtype) is not str or type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"not a piece of an array: {entry!r:.200}")
    dims = tuple(_whole(n) for n in shape)
    # NumPy has limits for the other dimensions of an empty array too.
    if prod(filter(None, dims)) * dtype_named(dtype).itemsize > MAX_ARRAY_BYTES:
        raise ValueError(f"array {path!r:.80} {list(dims)} is too large")
    found = PieceEntry(path, dtype, dims, _whole(start), _whole(elements))
    if found.start + found.elements > prod(dims):
        raise ValueError(f"elements {start} to {start + elements} lie outside of {path!r:.80} {list(dims)}")
    return found


def _whole(value: Any, most: int = MAX_ARRAY_BYTES) -> int:
    """Checks that a value is a whole number from 0 to `most`; raises ValueError if not."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"not a number from 0 to {most}: {value!r:.80}")
    return value


class Run(NamedTuple):
    """Elements of an array that lie in one file, from byte `offset` on. Runs sort by their first element, `start`."""

    start: int
    elements: int
    part: int
    offset: int


class Stored(NamedTuple):
    """A saved array: its runs in order, with each element in exactly one of them."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    runs: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the elements."""
        return prod(self.shape) * int(self.dtype.itemsize)


def index_of(parts: Sequence[Part]) -> dict[str, Stored]:
    """Returns the arrays by path, given all parts of a checkpoint in order.

    Raises ValueError if a part is missing, two parts disagree on an array, or an element is in none or in two.
    """
    numbers = [(part.number, part.parts) for part in parts]
    if not parts or numbers != [(n, len(parts)) for n in range(len(parts))]:
        raise ValueError(f"these are not all parts of one checkpoint: {numbers!s:.200}")
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    runs: dict[str, list[Run]] = {}
    for part in parts:
        for entry, offset in part.places():
            if kinds.setdefault(entry.path, (entry.dtype, entry.shape)) != (entry.dtype, entry.shape):
                raise ValueError(f"the parts disagree on the dtype or shape of {entry.path!r:.80}")
            runs.setdefault(entry.path, []).append(Run(entry.start, entry.elements, part.number, offset))
    index: dict[str, Stored] = {}
    for path, (dtype, shape) in kinds.items():
        found, end = sorted(runs[path]), 0
        for run in found:
            if run.start != end:
                where = "no part" if run.start > end else "two parts"
                raise ValueError(f"{path!r:.80}: element {min(run.start, end)} is in {where}")
            end += run.elements
        if end != prod(shape):
            raise ValueError(f"{path!r:.80}: element {end} is in no part")
        index[path] = Stored(dtype_named(dtype), shape, tuple(found))
    return index
