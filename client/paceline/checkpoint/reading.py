"""Reads arrays or ranges of them from a checkpoint, each file chunk once, and verifies the chunks that it reads."""

from __future__ import annotations

import math
import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.folder import check_sizes, read_manifest, unreadable
from paceline.checkpoint.part import CHUNK_BYTES, Part, index_of
from paceline.checkpoint.pieces import Shard
from paceline.checkpoint.tree import join
from paceline.errors import CheckpointDamaged, SizeMismatch

_CHUNKS = 4


class Reader:
    """Reads any part of a checkpoint, and counts in `bytes_read` what it has read from the files.

    Raises:
        CheckpointDamaged: the manifest is damaged, or a file is missing, cut, no plain file, or cannot be read. The
            files have not been read yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tag, self.parts, self._skeleton, files = read_manifest(folder)
        if files:
            raise CheckpointDamaged(
                f"{folder} is a checkpoint of replicas, which torch.distributed.checkpoint reads: plain workers cannot"
            )
        check_sizes(folder, self.parts)
        try:
            self.arrays = index_of(self.parts)
        except ValueError as error:
            raise CheckpointDamaged(f"{folder} is damaged: {error}") from error
        self.bytes_read = 0
        self._memory = np.empty(0, np.uint8)

    def state(self, wanted: Mapping[str, Shard] | None = None) -> Any:
        """Returns the state as it was saved; its arrays are new and writable.

        `wanted` has by path the shards that this rank needs of arrays that it does not need whole. Only the shapes of
        their values matter. The state has a `Shard` with the saved values in place of each.

        Raises:
            SizeMismatch: a wanted array does not exist, or has another shape.
            CheckpointDamaged: the bytes read are not the bytes written, or an array is larger than memory.
        """
        wanted = wanted or {}
        odd = [f"{path!r} is missing" for path in wanted if path not in self.arrays]
        odd += [
            f"{path!r} has shape {list(self.arrays[path].shape)}, not {list(shard.shape)}"
            for path, shard in wanted.items()
            if path in self.arrays and self.arrays[path].shape != tuple(shard.shape)
        ]
        if odd:
            raise SizeMismatch(f"{self.folder} does not fit: {'; '.join(odd[:8])}")
        values: dict[str, Any] = {}
        targets: dict[str, tuple[int, NDArray[Any]]] = {}
        for path, stored in self.arrays.items():
            shard = wanted.get(path)
            array = self._room(path, stored.shape if shard is None else shard.values.shape, stored.dtype)
            start = 0 if shard is None else shard.start
            values[path] = array if shard is None else Shard(array, start, stored.shape)
            targets[path] = start, array
        self.read(targets)
        try:
            return join(self._skeleton, values)
        except ValueError as error:
            raise CheckpointDamaged(f"{self.folder} is damaged: {error}") from error

    def read(self, targets: Mapping[str, tuple[int, NDArray[Any]]]) -> None:
        """Fills arrays with runs of the saved arrays, and verifies them as `verify` does.

        `targets` has by path the number of the first element and a contiguous array of the same dtype.
        """
        places: dict[int, list[tuple[int, NDArray[np.uint8]]]] = {}
        for path, (start, array) in targets.items():
            stored = self.arrays[path]
            assert array.dtype == stored.dtype
            assert array.flags.c_contiguous
            end, width, data = start + array.size, array.itemsize, array.reshape(-1).view(np.uint8)
            first = max(bisect_right(stored.runs, start, key=lambda run: run.start) - 1, 0)
            for run in stored.runs[first:]:
                low, high = max(start, run.start), min(end, run.start + run.elements)
                if low < high:
                    place = run.offset + (low - run.start) * width, data[(low - start) * width : (high - start) * width]
                    places.setdefault(run.part, []).append(place)
                if run.start >= end:
                    break
        for number, wanted in sorted(places.items()):
            self._read_part(self.parts[number], sorted(wanted, key=lambda place: place[0]))

    def _room(self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        try:
            return np.empty(shape, dtype)
        except MemoryError:
            size = math.prod(shape) * dtype.itemsize
            raise CheckpointDamaged(
                f"{self.folder} cannot be read: its array {path!r:.80} has {size:,} bytes, more than the free memory"
            ) from None

    def verify(self) -> None:
        """Reads and verifies all files; a CheckpointDamaged names the file and the position of bytes not written so."""
        for part in self.parts:
            for _ in self._blocks(part, [(0, part.chunks)]):
                pass

    def _read_part(self, part: Part, wanted: list[tuple[int, NDArray[np.uint8]]]) -> None:
        """Fills arrays from positions of a file, which are in order and do not overlap."""
        spans: list[tuple[int, int]] = []
        for offset, data in wanted:
            first, last = offset // CHUNK_BYTES, -(-(offset + data.size) // CHUNK_BYTES)
            if spans and first <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(last, spans[-1][1])
            else:
                spans.append((first, last))
        position = 0
        for low, block in self._blocks(part, spans):
            high = low + block.size
            while position < len(wanted) and wanted[position][0] < high:
                offset, data = wanted[position]
                start, end = max(offset, low), min(offset + data.size, high)
                data[start - offset : end - offset] = block[start - low : end - low]
                if offset + data.size > high:
                    break  # continues in the next block
                position += 1

    def _blocks(self, part: Part, spans: list[tuple[int, int]]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yields a few verified chunks at a time, with the position of the first byte; valid until the next iteration.

        `spans` are ascending: first chunk, and the one after the last.
        """
        path = self.folder / part.name
        if not self._memory.size:
            self._memory = np.empty(_CHUNKS * CHUNK_BYTES, np.uint8)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may have become a FIFO
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            for first, last in spans:
                for chunk in range(first, last, _CHUNKS):
                    low, high = chunk * CHUNK_BYTES, min(min(chunk + _CHUNKS, last) * CHUNK_BYTES, part.nbytes)
                    block = self._memory[: high - low]
                    _read_all(descriptor, block, low, path)
                    self.bytes_read += block.size
                    for number, start in enumerate(range(0, block.size, CHUNK_BYTES), chunk):
                        if zlib.crc32(block[start : start + CHUNK_BYTES].data) != part.checksum(number):
                            raise CheckpointDamaged(
                                f"{path} has other bytes than were written, in the "
                                f"{CHUNK_BYTES} bytes from {low + start} on"
                            )
                    yield low, block
        finally:
            os.close(descriptor)


def _read_all(descriptor: int, block: NDArray[np.uint8], offset: int, path: Path) -> None:
    while block.size:
        try:
            count = os.preadv(descriptor, [block.data], offset)
        except OSError as error:
            raise unreadable(path, error) from error
        if not count:
            raise CheckpointDamaged(f"{path} ends too early, at byte {offset}")
        block, offset = block[count:], offset + count
