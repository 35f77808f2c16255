"""One rank's part on its way to the disk: one pass over memory, checksums on the way."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from paceline.checkpoint.disk import write_file
from paceline.checkpoint.folder import hidden_folder
from paceline.checkpoint.part import CHUNK_BYTES, Part, entry_of, header_of, part_name
from paceline.checkpoint.pieces import Piece
from paceline.checkpoint.tag import Tag

__all__ = ["write_part"]

_BLOCK_BYTES = 4 * CHUNK_BYTES
"""Bytes for one write."""


def write_part(directory: Path, tag: Tag, attempt: str, number: int, parts: int, pieces: Sequence[Piece]) -> Part:
    """Writes one part into the folder that `open_folder` made; nobody sees it before `publish`.

    Args:
        directory: where checkpoints are kept.
        tag: which state this is.
        attempt: as for `open_folder`.
        number: which part, from 0.
        parts: how many there are.
        pieces: in the order of the file. Their memory must not change until this returns.

    Returns:
        What `publish` needs; the file is durable.

    Raises:
        OSError: the disk refused, or there is no such folder.
    """
    entries = tuple(map(entry_of, pieces))
    header = header_of(entries, number, parts)
    checksums: list[str] = []
    blocks = _blocks([memoryview(header), *(piece.values.view(np.uint8).data for piece in pieces)])
    path = hidden_folder(directory, tag, attempt) / part_name(number, parts)
    write_file(path, _checksummed(blocks, checksums))
    return Part(number, parts, len(header), entries, "".join(checksums))


def _checksummed(blocks: Iterable[memoryview], checksums: list[str]) -> Iterator[memoryview]:
    """The same blocks; notes the checksum of each chunk just before it is written, so that it is still in the cache."""
    for block in blocks:
        for start in range(0, len(block), CHUNK_BYTES):
            checksums.append(f"{zlib.crc32(block[start : start + CHUNK_BYTES]):08x}")
        yield block


def _blocks(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes in blocks of `_BLOCK_BYTES`, the last one shorter; copied where a block has several buffers."""
    pending: list[memoryview] = []
    room = _BLOCK_BYTES
    for buffer in buffers:
        while len(buffer):
            pending.append(buffer[:room])
            buffer, room = buffer[room:], room - len(pending[-1])
            if not room:
                yield _joined(pending)
                pending, room = [], _BLOCK_BYTES
    if pending:
        yield _joined(pending)


def _joined(buffers: list[memoryview]) -> memoryview:
    return buffers[0] if len(buffers) == 1 else memoryview(b"".join(buffers))
