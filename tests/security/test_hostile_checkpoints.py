"""Checkpoints that an attacker wrote: none hangs, fills memory or moves the cursor, and the one before is tried."""

from __future__ import annotations

import json
import os
import resource
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline import checkpoint
from paceline.checkpoint import folder as folders
from paceline.checkpoint.folder import MANIFEST, is_there, publish
from paceline.checkpoint.part import CHUNK_BYTES, Part, PieceEntry
from paceline.checkpoint.pieces import pieces_of
from paceline.checkpoint.reading import Reader
from paceline.checkpoint.writing import write_part
from paceline.cli.app import app
from paceline.errors import CheckpointDamaged, CheckpointFailed
from paceline.testing import run_ranks
from paceline_protocol import Tag

GOOD, BAD = (1, 1), (1, 2)
HUGE = 64 << 30
STATE = {"w": np.arange(8.0)}


def inspect(*arguments: object, code: int = 0) -> str:
    words = ["checkpoint", "inspect", *map(str, arguments)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Where two checkpoints are kept, of which the tests spoil the newer one."""
    for tag in (GOOD, BAD):
        checkpoint.save(tmp_path, STATE, tag)
    return tmp_path


def falls_back(directory: Path, words: str) -> None:
    """The newer one is refused in words, and the one before is loaded."""
    bad = directory / str(Tag(*BAD))
    with pytest.raises(CheckpointDamaged, match=words):
        Reader(bad).state()
    assert words in inspect(directory, code=1)
    loaded = checkpoint.load(directory)
    assert loaded is not None
    assert loaded.tag == Tag(*GOOD)
    np.testing.assert_array_equal(loaded.state["w"], STATE["w"])


def test_names_cannot_inject_terminal_escapes(tmp_path: Path) -> None:
    """ESC ] 0 ; would set the title, U+202E turn the line round, CR write over what was said."""
    name = "w\x1b]0;gone\x07\r\u202e\ud800"
    made = checkpoint.save(tmp_path / "a\x1b[2J", {name: np.zeros(1)}, GOOD)
    shown = inspect(made)
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(shown)
    assert r"w\x1b]0;gone\x07\r\u202e\ud800" in shown
    assert r"a\x1b[2J" in shown
    assert json.loads(inspect(made, "--json").splitlines()[-1])["arrays"][0]["path"] == name
    (made / "arrays.safetensors").unlink()
    assert "\x1b" not in inspect(made, code=1)


@pytest.mark.parametrize("name", [MANIFEST, "arrays.safetensors"])
@pytest.mark.timeout(20)
def test_a_file_that_is_not_regular_is_not_opened(two: Path, name: str) -> None:
    """To open a FIFO waits for a writer, who never comes."""
    bad = two / str(Tag(*BAD))
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir):
        (bad / name).unlink()
        make(bad / name)
        assert not is_there(bad)
        falls_back(two, "not a regular file")


def test_the_size_of_a_manifest_is_bounded(two: Path) -> None:
    """It is not read to find that out; and none is written that could not be read."""
    with (two / str(Tag(*BAD)) / MANIFEST).open("r+b") as file:
        file.truncate(HUGE)
    falls_back(two, "68,719,476,736 bytes; a manifest has at most 268,435,456")
    tag, skeleton = Tag(1, 3), {"w": {"$array": "w"}, "text": "x" * 2_000}
    folders.open_folder(two, tag, "a")
    part = write_part(two, tag, "a", 0, 1, pieces_of(STATE, 0, 1))
    with pytest.raises(CheckpointFailed, match="bytes as JSON, more than 2,000: keep large data in arrays"):
        publish(two, tag, "a", [part], skeleton, max_manifest_bytes=2_000)
    assert [str(tag) for tag in checkpoint.tags(two)] == [str(Tag(*GOOD)), str(Tag(*BAD))]


def test_an_enlarged_file_is_refused_by_its_size(two: Path) -> None:
    with (two / str(Tag(*BAD)) / "arrays.safetensors").open("r+b") as file:
        file.truncate(HUGE)
    falls_back(two, f"has {HUGE} bytes, not")


@pytest.fixture
def hole(tmp_path: Path) -> Path:
    """As `two`; the newer one is a file of one hole, and all that its manifest says of it is true."""
    checkpoint.save(tmp_path, STATE, GOOD)
    checksum = f"{zlib.crc32(bytes(CHUNK_BYTES)):08x}"
    entry = PieceEntry("w", "float64", (HUGE // 8,), 0, HUGE // 8)
    part = Part(0, 1, 0, (entry,), checksum * (HUGE // CHUNK_BYTES))
    tag = Tag(*BAD)
    folders.open_folder(tmp_path, tag, "a")
    with (folders.hidden_folder(tmp_path, tag, "a") / part.name).open("wb") as file:
        file.truncate(HUGE)
    publish(tmp_path, tag, "a", [part], {"w": {"$array": "w"}})
    return tmp_path


@pytest.fixture
def little_memory() -> Any:
    """Less than the arrays of `hole` take, whatever this machine has."""
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (min(HUGE // 2, most) if most >= 0 else HUGE // 2, most))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (before, most))


@pytest.mark.usefixtures("little_memory")
def test_an_array_larger_than_memory_raises_checkpoint_damaged(hole: Path) -> None:
    assert "68,719,476,736 bytes" in inspect(hole)  # which allocates nothing for it
    with pytest.raises(CheckpointDamaged, match="'w' has 68,719,476,736 bytes, more than the free memory"):
        checkpoint.load(hole, BAD)
    loaded = checkpoint.load(hole)
    assert loaded is not None
    assert loaded.tag == Tag(*GOOD)


@pytest.mark.usefixtures("little_memory")
def test_all_ranks_fall_back_to_the_checkpoint_before(hole: Path) -> None:
    def rank(group: Any) -> Any:
        loaded = checkpoint.load_sharded(hole, STATE, group)
        assert loaded is not None
        return loaded.tag

    assert run_ranks(2, rank) == [Tag(*GOOD)] * 2
