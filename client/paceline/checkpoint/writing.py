"""One rank's part on its way to the disk: one pass over memory, checksums beside it."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from paceline.checkpoint.disk import write_file
from paceline.checkpoint.folder import hidden_folder
from paceline.checkpoint.part import CHUNK_BYTES, Part, entry_of, header_of, part_name
from paceline.checkpoint.pieces import Piece
from paceline_protocol import Tag

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
    with closing(_checksummed(blocks, checksums)) as checked:
        write_file(path, checked)
    return Part(number, parts, len(header), entries, "".join(checksums))


def _checksummed(blocks: Iterable[memoryview], checksums: list[str]) -> Generator[memoryview, None, None]:
    """The same blocks; a second thread computes the checksums of each while it is being written.

    In step, so that one block is read from memory once, and copies of no more than two wait. Where no thread can be
    started (a limit is reached, or the interpreter is about to end) they are computed before the block is written.

    Measured (512 MiB, medians of 7, interleaved): checksums before each write 0.27 s, beside it 0.19 s, none 0.17 s.
    """
    with ThreadPoolExecutor(1, "paceline-checksums") as second:
        starts = True
        for block in blocks:
            found: Future[list[str]] | None = None
            if starts:
                try:
                    found = second.submit(_checksums_of, block)
                except RuntimeError:
                    starts = False
            if found is None:
                checksums.extend(_checksums_of(block))
            yield block
            if found is not None:
                checksums.extend(found.result())


def _checksums_of(block: memoryview) -> list[str]:
    """The checksum of each chunk of a block."""
    return [f"{zlib.crc32(block[at : at + CHUNK_BYTES]):08x}" for at in range(0, len(block), CHUNK_BYTES)]


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
