"""A part that is written behind the caller: copied before it may change, and errors are told once, to who asks."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.checkpoint import Tag, writing
from paceline.checkpoint.folder import open_folder, publish
from paceline.checkpoint.pieces import pieces_of
from paceline.checkpoint.reading import Reader
from paceline.checkpoint.writing import PartWriter, write_part
from paceline.errors import StepOrderError

TAG = Tag(1, 1)


def test_changes_after_wait_until_copied_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, so that the memory of the first copy is used again."""
    writer, changed = PartWriter(), threading.Event()
    write = writing.write_part

    def late(*args: Any) -> Any:
        changed.wait()
        return write(*args)

    monkeypatch.setattr(writing, "write_part", late)
    memories = []
    for attempt in ("a", "b"):
        arrays = {"x": np.arange(1_000), "y": np.ones(7, np.float16), "none": np.empty(0)}
        before = {path: array.copy() for path, array in arrays.items()}
        changed.clear()
        open_folder(tmp_path / attempt, TAG, attempt)
        writer.begin(tmp_path / attempt, TAG, attempt, 0, 1, pieces_of(arrays, 0, 1))
        writer.wait_until_copied()
        assert writer.is_writing
        for array in arrays.values():
            array[...] = 0
        changed.set()
        part = writer.wait()
        assert not writer.is_writing
        read = Reader(publish(tmp_path / attempt, TAG, attempt, [part], {p: {"$array": p} for p in arrays})).state()
        for path, array in before.items():
            np.testing.assert_array_equal(read[path], array)
        memories.append(writer._memory.ctypes.data)
    assert memories[0] == memories[1]


def test_a_write_error_is_raised_once_and_the_writer_stays_usable(tmp_path: Path) -> None:
    writer = PartWriter()
    pieces = pieces_of({"x": np.arange(10)}, 0, 1)
    writer.begin(tmp_path, TAG, "nobodyopened", 0, 1, pieces)
    writer.wait_until_copied()
    with pytest.raises(StepOrderError, match="still being written"):
        writer.begin(tmp_path, TAG, "x", 0, 1, pieces)
    with pytest.raises(FileNotFoundError):
        writer.wait()
    with pytest.raises(StepOrderError, match="no part"):
        writer.wait()
    open_folder(tmp_path, TAG, "x")
    writer.begin(tmp_path, TAG, "x", 0, 1, pieces)
    assert writer.wait().nbytes > 80


def test_the_part_is_written_even_if_no_checksum_thread_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {"x": np.arange(2_000_000), "y": np.ones(7, np.float16)}
    pieces = pieces_of(arrays, 0, 1)
    open_folder(tmp_path, TAG, "a")
    usual = write_part(tmp_path, TAG, "a", 0, 1, pieces)
    started = []

    def start(self: ThreadPoolExecutor, call: Any, *args: Any) -> Any:
        started.append(call)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", start)
    open_folder(tmp_path, TAG, "b")
    assert write_part(tmp_path, TAG, "b", 0, 1, pieces) == usual
    assert len(started) == 1


def test_a_disk_error_leaves_no_checksum_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    open_folder(tmp_path, TAG, "a")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space") as raised:
        write_part(tmp_path, TAG, "a", 0, 1, pieces_of({"x": np.arange(2_000_000)}, 0, 1))
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("paceline-checksums")], f"while there is {raised.value}"
