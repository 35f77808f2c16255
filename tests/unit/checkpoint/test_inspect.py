"""`paceline checkpoint inspect`: what it shows, verifies and makes whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline import checkpoint
from paceline.checkpoint import Shard, save_sharded
from paceline.checkpoint.folder import SavedFile, hidden_folder, open_folder, publish
from paceline.cli.app import app
from paceline.testing import run_ranks
from paceline_protocol import Tag

runner = CliRunner()
W = np.arange(8.0)


def run(*arguments: object, code: int = 0) -> Any:
    result = runner.invoke(app, ["checkpoint", "inspect", *map(str, arguments)], env={"COLUMNS": "120"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One of two parts, in front of an older one."""
    runs = tmp_path / "runs"
    checkpoint.save(runs, {}, (1, 1))

    def rank(group: Any) -> Path:
        state = {"w": Shard(W[4 * group.rank :][:4], 4 * group.rank, (2, 4)), "[b]": np.float32(1), "step": 7}
        return save_sharded(runs, state, (1, 7), group)

    return run_ranks(2, rank)[0]


def test_inspect_prints_a_readable_summary(folder: Path) -> None:
    for directory in (folder, folder.parent):
        shown = run(directory, "--verify").stdout
        for words in (
            "generation 1, step 7",
            "float64",
            "[2, 4]",
            "0, 1",
            "[b]",
            "in 2 parts",
            "every checksum is right",
        ):
            assert words in shown


def test_inspect_json_output(folder: Path) -> None:
    seen = json.loads(run(folder, "--json").stdout.splitlines()[-1])
    assert (seen["generation"], seen["step"], seen["bytes"], seen["verified"]) == (1, 7, 68, False)
    assert [part["file"] for part in seen["parts"]] == [f"arrays-0000{n}-of-00002.safetensors" for n in (0, 1)]
    assert seen["arrays"][1] == {"path": "w", "dtype": "float64", "shape": [2, 4], "bytes": 64, "parts": [0, 1]}
    assert seen["consolidated"] is None


def test_consolidate_writes_all_arrays_into_one_file(folder: Path, tmp_path: Path) -> None:
    for tag in [(2, 1), (3, 1)]:
        checkpoint.save(tmp_path / "out", {}, tag)
    made = json.loads(run(folder, "--consolidate", tmp_path / "out", "--json").stdout.splitlines()[-1])["consolidated"]
    assert Path(made) == tmp_path / "out" / folder.name
    assert len(checkpoint.tags(tmp_path / "out")) == 3  # nothing was removed
    assert sorted(path.name for path in Path(made).iterdir()) == ["arrays.safetensors", "manifest.json"]
    found = checkpoint.load(tmp_path / "out", (1, 7))
    assert found is not None
    np.testing.assert_array_equal(found.state["w"], W.reshape(2, 4))
    assert found.state["step"] == 7


def test_damage_prints_one_line_and_exits_with_code_1(folder: Path) -> None:
    path = folder / "arrays-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    run(folder)  # nothing of it was read
    result = run(folder, "--verify", code=1)
    assert result.stderr.count("\n") == 1
    assert str(path) in result.stderr


def test_a_directory_without_checkpoints_exits_with_code_2(tmp_path: Path) -> None:
    result = run(tmp_path, code=2)
    assert result.stderr == f"paceline: there is no checkpoint in {tmp_path}\n"


def test_a_checkpoint_of_replicas_shows_and_verifies_its_files(tmp_path: Path) -> None:
    tag = Tag(2, 7)
    open_folder(tmp_path, tag, "a1")
    (data := hidden_folder(tmp_path, tag, "a1") / "__0_0.distcp").write_bytes(bytes(2000))
    folder = publish(tmp_path, tag, "a1", (), "a1", [SavedFile.of(data)])
    shown = run(tmp_path, "--verify").stdout
    for words in ("generation 2, step 7", "__0_0.distcp", "1 file of", "2,000 bytes", "every checksum is right"):
        assert words in shown
    found = json.loads(run(folder, "--json").stdout)
    assert (found["files"], found["verified"]) == ([{"file": "__0_0.distcp", "bytes": 2000}], False)
    assert "dcp_to_torch" in run(folder, "--consolidate", tmp_path / "made", code=2).output
    (folder / data.name).write_bytes(bytes(1999) + b"x")
    assert "has other bytes than were written" in run(folder, "--verify", code=1).output
