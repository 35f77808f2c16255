"""Ranges of what was saved: the right bytes, verified, and few others read."""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import Shard, Tag, save
from paceline.checkpoint.folder import open_folder, publish
from paceline.checkpoint.part import CHUNK_BYTES
from paceline.checkpoint.pieces import pieces_of
from paceline.checkpoint.reading import Reader
from paceline.checkpoint.tree import split
from paceline.checkpoint.writing import write_part
from paceline.errors import CheckpointDamaged, CheckpointFailed, SizeMismatch

TAG = Tag(1, 1)
LARGE = np.random.default_rng(0).integers(0, 256, 3 * CHUNK_BYTES + 12_345, np.uint8)
STATE: dict[str, Any] = {
    "large": LARGE,
    "half": np.arange(1_000).astype(ml_dtypes.bfloat16),
    "z": np.array([1 + 2j, 3]),
    "none": np.empty((0, 3)),
    "one": np.float32(4),
}


def write(directory: Path, world: int, state: Any = STATE) -> Path:
    """As `world` ranks that all hold the whole."""
    skeleton, arrays = split(state)
    open_folder(directory, TAG, "a")
    parts = [write_part(directory, TAG, "a", rank, world, pieces_of(arrays, rank, world)) for rank in range(world)]
    return publish(directory, TAG, "a", parts, skeleton)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [write(tmp_path_factory.mktemp(f"w{world}"), world) for world in (1, 3, 4)]


@given(st.integers(0, 2), st.integers(0, LARGE.size), st.integers(0, LARGE.size), st.integers(0, 1_000))
def test_any_range_can_be_read(folders: list[Path], which: int, low: int, high: int, cut: int) -> None:
    low, high = sorted((low, high))
    wanted = {
        "large": Shard(np.empty(high - low, np.uint8), low, LARGE.shape),
        "half": Shard(np.empty(1_000 - cut), cut, (1_000,)),
    }
    reader = Reader(folders[which])
    state = reader.state(wanted)
    assert state["large"].values.tobytes() == LARGE[low:high].tobytes()
    assert state["half"].values.tobytes() == STATE["half"][cut:].tobytes()
    assert (state["large"].start, state["large"].shape) == (low, LARGE.shape)
    assert state["z"].tolist() == [1 + 2j, 3]
    assert state["none"].shape == (0, 3)
    assert state["one"] == np.float32(4)


@pytest.mark.parametrize("world", [1, 4])
def test_only_the_chunks_of_a_range_are_read(tmp_path: Path, world: int) -> None:
    """The chunks that a range touches, each once: however many arrays lie in one."""
    state = {"large": np.zeros(16 * CHUNK_BYTES, np.uint8), **{f"small{n}": np.full(9, n) for n in range(500)}}
    folder = write(tmp_path, world, state)
    reader = Reader(folder)
    size = 2 * CHUNK_BYTES
    reader.state({"large": Shard(np.empty(size, np.uint8), 5 * CHUNK_BYTES, state["large"].shape)})
    small = 500 * 9 * 8
    assert size + small <= reader.bytes_read <= size + 4 * CHUNK_BYTES
    before = reader.bytes_read
    reader.read({"small7": (0, np.empty(9, int))})
    assert reader.bytes_read - before <= CHUNK_BYTES


def test_damage_outside_the_range_does_not_prevent_reading(tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    path = folder / "arrays-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reader = Reader(folder)
    reader.read({"large": (0, np.empty(1_000, np.uint8))})
    with pytest.raises(CheckpointDamaged, match=re.escape(str(path))):
        reader.verify()
    with pytest.raises(CheckpointDamaged, match="other bytes than were written"):
        reader.state()


def test_a_file_that_shrinks_or_vanishes_counts_as_damaged(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    reader = Reader(folder)
    (folder / "arrays.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointDamaged, match="ends too early, at byte"):
        reader.verify()
    (folder / "arrays.safetensors").unlink()
    with pytest.raises(CheckpointDamaged, match="missing"):
        reader.verify()


def test_overlapping_parts_count_as_damaged(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, {"w": np.arange(8)})
    outer = json.loads((folder / "manifest.json").read_text())
    body = json.loads(outer["body"])
    body["parts"][1]["pieces"][0][3] = 3
    text = json.dumps(body)
    (folder / "manifest.json").write_text(
        json.dumps({"blake2b": blake2b(text.encode(), digest_size=16).hexdigest(), "body": text})
    )
    with pytest.raises(CheckpointDamaged, match="element 3 is in two parts"):
        Reader(folder)


def test_missing_or_misshapen_arrays_raise_size_mismatch(tmp_path: Path) -> None:
    reader = Reader(save(tmp_path, STATE, TAG))
    with pytest.raises(SizeMismatch, match=r"'other' is missing; 'half' has shape \[1000\], not \[3\]"):
        reader.state({"other": Shard(np.empty(1), 0, (3,)), "half": Shard(np.empty(1), 0, (3,))})


def test_publish_without_all_parts_raises_checkpoint_failed(tmp_path: Path) -> None:
    """Hosts that share no disk: nobody publishes what no host has whole."""
    skeleton, arrays = split(STATE)
    for host in ("a", "b"):
        open_folder(tmp_path / host, TAG, "x")
    parts = [
        write_part(tmp_path / host, TAG, "x", rank, 2, pieces_of(arrays, rank, 2)) for rank, host in enumerate("ab")
    ]
    for host in ("a", "b"):
        with pytest.raises(CheckpointFailed, match="a disk that all ranks share"):
            publish(tmp_path / host, TAG, "x", parts, skeleton)
        assert not (tmp_path / host / str(TAG)).exists()
    with pytest.raises(CheckpointFailed, match="not all parts"):
        publish(tmp_path / "a", TAG, "x", parts[:1], skeleton)


def test_a_late_attempt_does_not_change_a_published_checkpoint(tmp_path: Path) -> None:
    """A late writer of one attempt cannot reach what another has published."""
    skeleton, arrays = split(STATE)
    pieces = pieces_of(arrays, 0, 1)
    for attempt in ("late", "new"):
        open_folder(tmp_path, TAG, attempt)
    folder = publish(tmp_path, TAG, "new", [write_part(tmp_path, TAG, "new", 0, 1, pieces)], skeleton)
    before = (folder / "arrays.safetensors").stat()
    late = [write_part(tmp_path, TAG, "late", 0, 1, pieces)]
    assert publish(tmp_path, TAG, "late", late, skeleton) == folder
    after = (folder / "arrays.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    open_folder(tmp_path, TAG, "twice")
    with pytest.raises(FileExistsError):
        open_folder(tmp_path, TAG, "twice")
    for name in ("", "../x", "A", "x" * 65):
        with pytest.raises(ValueError, match="attempt"):
            open_folder(tmp_path, TAG, name)
