"""Checkpoints beside training: what was committed is written, once, by one of a host, and never what was undone."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import checkpoint
from paceline.checkpoint.tag import Tag
from paceline.elastic.saver import Saver
from paceline.elastic.state import TrainState
from paceline.errors import CheckpointDamaged, SizeMismatch
from paceline.group import Group
from support.parts import local_mesh, world_of


@pytest.fixture
def alone() -> Any:
    with world_of(1) as (group,):
        yield group


def steps(saver: Saver, state: TrainState, group: Group, first: int, last: int, generation: int = 1) -> None:
    """What the line does: the word of a step commits the one before."""
    for number in range(first, last + 1):
        saver.begin(Tag(generation if number > 1 else 0, number - 1), state, group)
        saver.commit(number - 1)
        state.step = number


def test_every_so_many_committed_steps(tmp_path: Path, alone: Group) -> None:
    values = {"n": np.zeros(1)}
    state, saver = TrainState(values=values), Saver(tmp_path, 2)
    steps(saver, state, alone, 1, 3)
    values["n"] += 1  # while it is written: what was copied counts
    saver.wait()
    assert checkpoint.tags(tmp_path) == [Tag(1, 2)]
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found.state["step"] == 2
    assert found.state["parts"]["values"]["rest"]["n"] == 0
    steps(saver, state, alone, 4, 4)
    saver.wait()
    assert checkpoint.tags(tmp_path) == [Tag(1, 2)], "step 4 is applied, and not committed"


def test_nothing_without_a_directory_or_an_interval(tmp_path: Path, alone: Group) -> None:
    for saver in (Saver(None, None), Saver(tmp_path, None)):
        steps(saver, TrainState(), alone, 1, 5)
        saver.load(TrainState())
        saver.wait()
    Saver(None, None).keep(Tag(1, 5), TrainState(), alone)
    assert checkpoint.tags(tmp_path) == []


def test_the_last_state_is_kept(tmp_path: Path, alone: Group) -> None:
    saver = Saver(tmp_path, None)
    saver.keep(None, TrainState(), alone)
    assert checkpoint.tags(tmp_path) == []
    saver.keep(Tag(1, 5), TrainState(), alone)
    assert checkpoint.tags(tmp_path) == [Tag(1, 5)]


def test_a_step_that_comes_again_is_copied_once(tmp_path: Path, alone: Group) -> None:
    state, saver = TrainState(), Saver(tmp_path, 1)
    for attempt in range(3):
        saver.begin(Tag(1, 1), state, alone)
        state.step = attempt  # an undone step leaves no trace; this one shows when the copy was made
    saver.commit(1)
    saver.wait()
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found.state["step"] == 0


def test_what_the_line_left_behind_is_not_written(tmp_path: Path, alone: Group) -> None:
    saver = Saver(tmp_path, 2)
    saver.begin(Tag(1, 2), TrainState(), alone)  # then the generation fails, and the line goes on from its step 1
    saver.begin(Tag(2, 1), TrainState(), alone)
    saver.begin(Tag(2, 2), TrainState(), alone)
    saver.commit(2)
    saver.wait()
    assert checkpoint.tags(tmp_path) == [Tag(2, 2)]


def test_what_the_line_left_behind_is_not_written_by_one_that_is_not_to_write(tmp_path: Path) -> None:
    with world_of(2) as groups:
        saver = Saver(tmp_path, 2)
        saver.begin(Tag(1, 2), TrainState(), groups[0])
        saver.begin(Tag(2, 2), TrainState(), groups[1])
        saver.commit(2)
        saver.wait()
        assert checkpoint.tags(tmp_path) == []


def test_lowest_rank_of_each_host_writes(tmp_path: Path) -> None:
    with world_of(4) as groups:
        for group in groups:
            mesh = local_mesh(group.mesh)
            mesh.peers = [replace(peer, host="ab"[peer.rank // 2]) for peer in mesh.peers]
        for group in groups:
            folder = tmp_path / str(group.rank)
            saver = Saver(folder, 1)
            saver.begin(Tag(1, 1), TrainState(), group)
            saver.commit(1)
            saver.keep(Tag(1, 2), TrainState(), group)
            saver.wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]
        assert checkpoint.tags(tmp_path / "2") == [Tag(1, 1), Tag(1, 2)]


def test_slow_disk_leaves_one_out(tmp_path: Path, alone: Group, monkeypatch: Any, caplog: Any) -> None:
    go_on, save = threading.Event(), checkpoint.save

    def slow(*args: Any) -> Any:
        assert go_on.wait(10)
        return save(*args)

    monkeypatch.setattr(checkpoint, "save", slow)
    saver = Saver(tmp_path, 1)
    steps(saver, TrainState(), alone, 1, 3)
    assert "no checkpoint of step 2: the one before is still being written" in caplog.text
    go_on.set()
    saver.wait()
    assert checkpoint.tags(tmp_path) == [Tag(1, 1)]


def test_disk_that_refuses(tmp_path: Path, alone: Group, monkeypatch: Any) -> None:
    def full(*args: Any) -> Any:
        raise OSError("no space")

    monkeypatch.setattr(checkpoint, "save", full)
    saver = Saver(tmp_path, 1)
    steps(saver, TrainState(), alone, 1, 2)
    with pytest.raises(OSError, match="no space"):
        saver.wait()
    saver.wait()  # told once
    with pytest.raises(OSError, match="no space"):
        saver.keep(Tag(1, 5), TrainState(), alone)


def test_load_takes_the_greatest_that_is_whole(tmp_path: Path, alone: Group, caplog: Any) -> None:
    state = TrainState(values={"n": np.ones(1)})
    for step in (1, 2):
        state.step = step
        Saver(tmp_path, None).keep(Tag(1, step), state, alone)
    (tmp_path / str(Tag(1, 2)) / "arrays.safetensors").write_bytes(b"x")
    state.step, saver = 0, Saver(tmp_path, 1)
    saver.load(state)
    assert (state.step, saver.tag) == (1, Tag(1, 1))
    assert "g00000001-s0000000002 is left out" in caplog.text
    saver.begin(Tag(1, 1), state, alone)
    saver.commit(1)
    saver.wait()  # what was loaded is not written again
    with pytest.raises(SizeMismatch):
        Saver(tmp_path, None).load(TrainState(other={}))
    (tmp_path / str(Tag(1, 1)) / "manifest.json").write_bytes(b"x")
    with pytest.raises(CheckpointDamaged):
        Saver(tmp_path, None).load(state)
    empty = Saver(tmp_path / "nothing", None)
    empty.load(state)
    assert empty.tag == Tag(0, 0)


@pytest.mark.parametrize(("directory", "every"), [("d", 0), ("d", -1), (None, 3)])
def test_bad_arguments(directory: str | None, every: int) -> None:
    with pytest.raises(ValueError, match="checkpoint_every"):
        Saver(directory, every)
