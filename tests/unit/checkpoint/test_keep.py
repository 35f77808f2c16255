"""Checkpoints on disk: found by tag, checked, damaged ones left out by name, and whole after a crash at any line."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import checkpoint
from paceline.checkpoint import Tag
from paceline.checkpoint.folder import HIDDEN, hidden_name
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


def test_the_greatest_tag_is_loaded_and_old_ones_go(tmp_path: Path) -> None:
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


def test_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None
    assert checkpoint.load(tmp_path / "not there") is None
    assert checkpoint.tags(tmp_path / "not there") == []
    with pytest.raises(CheckpointDamaged, match="missing"):
        checkpoint.load(tmp_path, (1, 1))


def test_equal_tags_are_equal_states(tmp_path: Path) -> None:
    first = checkpoint.save(tmp_path, state(1), (1, 1))
    written = (first / "manifest.json").stat().st_mtime_ns
    assert checkpoint.save(tmp_path, state(1), (1, 1)) == first
    assert (first / "manifest.json").stat().st_mtime_ns == written


def test_refused_states_write_nothing(tmp_path: Path) -> None:
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
def test_a_damaged_one_is_named_and_the_one_before_it_used(
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


def test_the_last_good_one_is_never_removed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(1), (1, 1), keep=1)
    for step in (2, 3):
        cut(checkpoint.save(tmp_path, state(step), (1, step), keep=5) / "arrays.safetensors")
    checkpoint.save(tmp_path, state(2), (0, 2), keep=1)  # a late writer of an older line
    assert loaded(tmp_path) == 1


def test_if_all_are_damaged_nothing_is_made_up(tmp_path: Path) -> None:
    for step in (1, 2):
        cut(checkpoint.save(tmp_path, state(step), (1, step)) / "arrays.safetensors")
    with pytest.raises(CheckpointDamaged, match=r"no checkpoint in .* is whole: .*0001/arrays"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("names", ['"../../x"', '"/etc/passwd"', '""', '".."'])
def test_a_manifest_names_files_of_its_own_folder_only(tmp_path: Path, names: str) -> None:
    folder = checkpoint.save(tmp_path, state(1), (1, 1))
    outer = json.loads((folder / "manifest.json").read_text())
    outer["body"] = outer["body"].replace('"arrays.safetensors"', names)
    outer["blake2b"] = hashlib.blake2b(outer["body"].encode(), digest_size=16).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(outer))
    with pytest.raises(CheckpointDamaged, match="no file of this folder"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("size", ["Infinity", "[]", "null", '"x"'])
def test_a_manifest_with_a_size_that_is_none(tmp_path: Path, size: str) -> None:
    folder = checkpoint.save(tmp_path, state(1), (1, 1))
    outer = json.loads((folder / "manifest.json").read_text())
    outer["body"] = re.sub(r'"bytes":\d+', f'"bytes":{size}', outer["body"])
    outer["blake2b"] = hashlib.blake2b(outer["body"].encode(), digest_size=16).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(outer))
    with pytest.raises(CheckpointDamaged, match="manifest"):
        checkpoint.load(tmp_path)


def test_what_a_dead_writer_left_is_removed_in_time(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    mine = hidden_name("x")
    left = tmp_path / mine.replace(f"-{os.getpid()}-", f"-{int(dead.stdout)}-")
    others = tmp_path / f"{HIDDEN}another-host-{int(dead.stdout)}-x"
    for path in (left, others, tmp_path / mine):
        path.mkdir()
        os.utime(path, (0, 0))
    checkpoint.save(tmp_path, state(1), (1, 1))
    assert not left.exists()
    assert others.exists()
    assert (tmp_path / mine).exists()


def test_tags_are_read_from_whole_names_only() -> None:
    assert Tag.parse(str(Tag(3, 120))) == (3, 120)
    for name in ("g3", "g00000003-s0000000120x", "xg00000003-s0000000120", ".writing-g00000003-s0000000120", "g-1-s0"):
        assert Tag.parse(name) is None
    assert sorted(map(str, [Tag(10, 5), Tag(2, 20), Tag(2, 3)])) == [str(Tag(2, 3)), str(Tag(2, 20)), str(Tag(10, 5))]


CRASH = """
import os, sys
from pathlib import Path
import numpy as np
from paceline import checkpoint

def state(step):
    return {"step": step, "weights": np.full((50, 20), step, np.float32), "names": ("a", b"b", None)}

directory, keep = Path(sys.argv[1]), int(sys.argv[2])
crashed = 0
for line in range(1, 10_000):
    here = directory / str(line)
    for step in (10, 20):
        checkpoint.save(here, state(step), (1, step), keep=keep)
    child = os.fork()
    if not child:
        left = line
        def trace(frame, event, arg):
            global left
            if "/paceline/checkpoint/" not in frame.f_code.co_filename:
                return None
            left -= event == "line"
            if not left:
                os._exit(9)      # as SIGKILL: no finally runs, nothing is flushed
            return trace
        sys.settrace(trace)
        checkpoint.save(here, state(30), (1, 30), keep=keep)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(line, code)
    if code == 0:
        break
"""


def test_a_crash_at_any_line_leaves_the_last_good_one(tmp_path: Path) -> None:
    run = [sys.executable, "-c", CRASH, str(tmp_path), "1"]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=50)
    codes = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(codes) > 60
    assert [code for _, code in codes] == [9] * (len(codes) - 1) + [0]
    steps = [loaded(tmp_path / str(line)) for line, _ in codes]
    assert steps == sorted(steps)  # the old one up to some line, the new one from there on
    assert set(steps) == {20, 30}
    for line, _ in codes:
        checkpoint.save(tmp_path / str(line), state(40), (1, 40), keep=1)
        assert loaded(tmp_path / str(line)) == 40
