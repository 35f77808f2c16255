"""Checkpoints on disk: found by tag, checked, damaged ones left out by name, and whole after a crash at any line."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from paceline import checkpoint
from paceline.checkpoint import Tag
from paceline.checkpoint.folder import hidden_folder, open_folder
from paceline.errors import CheckpointDamaged, UnsupportedOp


def state(step: int) -> dict[str, Any]:
    return {"step": step, "weights": np.full((50, 20), step, np.float32), "names": ("a", b"b", None)}


def loaded(directory: Path) -> int:
    """The step whose state is there, whole."""
    found = checkpoint.load(directory)
    assert found is not None
    assert found.tag.step == found.state["step"]
    np.testing.assert_array_equal(found.state["weights"], state(found.tag.step)["weights"])
    assert found.state["names"] == ("a", b"b", None)
    return found.tag.step


def test_the_greatest_tag_is_loaded_and_old_checkpoints_are_removed(tmp_path: Path) -> None:
    """Generation before step: a line that began anew at an earlier step is the later one."""
    for tag in [(1, 10), (1, 30), (2, 20), (10, 5)]:
        checkpoint.save(tmp_path / "run", state(tag[1]), tag)
    assert checkpoint.tags(tmp_path / "run") == [(2, 20), (10, 5)]
    assert loaded(tmp_path / "run") == 5
    assert checkpoint.load(tmp_path / "run", (2, 20)).state["step"] == 20  # type: ignore[union-attr]
    assert [path.name for path in sorted((tmp_path / "run").iterdir())] == [
        "g00000002-s0000000020",
        "g00000010-s0000000005",
    ]


def test_loading_from_a_directory_without_checkpoints_returns_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None
    assert checkpoint.load(tmp_path / "not there") is None
    assert checkpoint.tags(tmp_path / "not there") == []
    with pytest.raises(CheckpointDamaged, match="missing"):
        checkpoint.load(tmp_path, (1, 1))


def test_saving_an_existing_tag_again_writes_nothing(tmp_path: Path) -> None:
    first = checkpoint.save(tmp_path, state(1), (1, 1))
    written = (first / "manifest.json").stat().st_mtime_ns
    assert checkpoint.save(tmp_path, state(1), (1, 1)) == first
    assert (first / "manifest.json").stat().st_mtime_ns == written


def test_refused_states_and_tags_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOp, match="bad"):
        checkpoint.save(tmp_path / "new", {"bad": object()}, (1, 1))
    assert not (tmp_path / "new").exists()
    for tag, keep in (((-1, 0), 1), ((0, -1), 1), ((0, 0), 0)):
        with pytest.raises(ValueError, match="keep"):
            checkpoint.save(tmp_path, {}, tag, keep=keep)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("file", ["arrays.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [cut, flip, empty, Path.unlink])
def test_a_damaged_checkpoint_is_logged_and_the_previous_one_loaded(
    tmp_path: Path, file: str, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, state(1), (1, 1))
    folder = checkpoint.save(tmp_path, state(2), (1, 2))
    damage(folder / file)
    with caplog.at_level(logging.ERROR, "paceline.checkpoint"):
        assert loaded(tmp_path) == 1
    assert str(folder / file) in caplog.text
    with pytest.raises(CheckpointDamaged, match=file):
        checkpoint.load(tmp_path, (1, 2))
    checkpoint.save(tmp_path, state(2), (1, 2))  # written again
    assert loaded(tmp_path) == 2


def test_the_last_intact_checkpoint_is_never_removed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(1), (1, 1), keep=1)
    for step in (2, 3):
        cut(checkpoint.save(tmp_path, state(step), (1, step), keep=5) / "arrays.safetensors")
    checkpoint.save(tmp_path, state(2), (0, 2), keep=1)  # a late writer of an older line
    assert loaded(tmp_path) == 1


def test_load_raises_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        cut(checkpoint.save(tmp_path, state(step), (1, step)) / "arrays.safetensors")
    with pytest.raises(CheckpointDamaged, match=r"no checkpoint in .* is intact: .*0001/arrays"):
        checkpoint.load(tmp_path)


def seal(folder: Path, body: str) -> None:
    """A manifest with that body, and a checksum that is right."""
    outer = {"blake2b": hashlib.blake2b(body.encode(), digest_size=16).hexdigest(), "body": body}
    (folder / "manifest.json").write_text(json.dumps(outer))


def body_of(folder: Path) -> Any:
    return json.loads(json.loads((folder / "manifest.json").read_text())["body"])


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
        {"format": None},
        {"tag": [1, 2]},
        {"tag": [1]},
        {"tag": ["1", "1"]},
        {"tag": None},
        {"parts": []},
        {"parts": 3},
        {"parts": [{}]},
        {"state": {"$array": "other"}},
        {"state": {"$array": []}},
    ],
)
def test_a_manifest_with_invalid_fields_counts_as_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = checkpoint.save(tmp_path, state(1), (1, 1))
    seal(folder, json.dumps(body_of(folder) | change))
    with pytest.raises(CheckpointDamaged, match="g00000001-s0000000001"):
        checkpoint.load(tmp_path, (1, 1))


@pytest.mark.parametrize("size", ["Infinity", "[]", "null", '"x"', "1e999", "-1", "true"])
def test_a_manifest_with_an_invalid_size_counts_as_damaged(tmp_path: Path, size: str) -> None:
    folder = checkpoint.save(tmp_path, state(1), (1, 1))
    body = json.loads((folder / "manifest.json").read_text())["body"]
    seal(folder, re.sub(r'"bytes":\d+', f'"bytes":{size}', body))
    with pytest.raises(CheckpointDamaged, match="manifest"):
        checkpoint.load(tmp_path)


def test_a_part_larger_than_its_file_counts_as_damaged(tmp_path: Path) -> None:
    """No memory is taken for it: the file has its say first."""
    folder = checkpoint.save(tmp_path, {"w": np.ones(4, np.uint8)}, (1, 1))
    body = body_of(folder)
    (part,) = body["parts"]
    part["pieces"] = [["w", "uint8", [1 << 38], 0, 1 << 38]]
    part["bytes"] = part["header"] + (1 << 38)
    part["crc32"] = "0" * 8 * -(-part["bytes"] // (1 << 20))
    seal(folder, json.dumps(body))
    with pytest.raises(CheckpointDamaged, match="bytes, not"):
        checkpoint.load(tmp_path)


def test_old_unfinished_attempts_are_removed_once_superseded(tmp_path: Path) -> None:
    """Once it is old, and a checkpoint as great is there: nobody waits for it."""
    names = {"overtaken": Tag(1, 1), "fresh": Tag(1, 1), "ahead": Tag(1, 3)}
    for attempt, tag in names.items():
        open_folder(tmp_path, tag, attempt)
        if attempt != "fresh":
            os.utime(hidden_folder(tmp_path, tag, attempt), (0, 0))
    (tmp_path / ".writing-by-somebody-else").mkdir()
    checkpoint.save(tmp_path, state(2), (1, 2))
    left = {attempt for attempt, tag in names.items() if hidden_folder(tmp_path, tag, attempt).exists()}
    assert left == {"fresh", "ahead"}
    assert (tmp_path / ".writing-by-somebody-else").exists()


def test_arrays_can_be_read_by_safetensors(tmp_path: Path) -> None:
    saved = {"a": np.arange(6.0).reshape(2, 3), "__metadata__": np.ones(2, np.int8), "z": np.array([1 + 2j])}
    folder = checkpoint.save(tmp_path, saved, (1, 1))
    read = load_file(folder / "arrays.safetensors")
    np.testing.assert_array_equal(read["a"], saved["a"])
    np.testing.assert_array_equal(read["__metadata__'"], saved["__metadata__"])
    np.testing.assert_array_equal(read["z"], [[1, 2]])


def test_tags_are_parsed_only_from_exact_names() -> None:
    assert Tag.parse(str(Tag(3, 120))) == (3, 120)
    for name in ("g3", "g00000003-s0000000120x", "xg00000003-s0000000120", ".writing-g00000003-s0000000120", "g-1-s0"):
        assert Tag.parse(name) is None
    assert sorted(map(str, [Tag(10, 5), Tag(2, 20), Tag(2, 3)])) == [str(Tag(2, 3)), str(Tag(2, 20)), str(Tag(10, 5))]
