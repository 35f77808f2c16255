"""Checkpoints beside training: what was committed is written, once, by one of a host, and never what was undone."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import checkpoint
from paceline._base.activity import MemberCounters
from paceline._elastic import saver as saver_module
from paceline._elastic.saver import Saver
from paceline._elastic.train_state import TrainState
from paceline._group import Group
from paceline._links.fault import Suspicion
from paceline._links.local import next_meshes
from paceline.checkpoint import folder, keep
from paceline.checkpoint.writing import write_part
from paceline.errors import CheckpointDamaged, CheckpointFailed, SizeMismatch
from paceline_protocol import Tag
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.parts import at_once, each, local_mesh, world_of


@pytest.fixture
def alone() -> Any:
    with world_of(1) as (group,):
        yield group


def steps(saver: Saver, state: TrainState, group: Group, first: int, last: int, generation: int = 1) -> None:
    """What the line does: the word of a step commits the one before."""
    for number in range(first, last + 1):
        saver.begin(Tag(generation if number > 1 else 0, number - 1), state._core, group)
        saver.commit(number - 1)
        state.step = number


def test_a_checkpoint_is_written_every_n_committed_steps(tmp_path: Path, alone: Group) -> None:
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


def test_nothing_is_written_without_a_directory_or_an_interval(tmp_path: Path, alone: Group) -> None:
    for saver in (Saver(None, None), Saver(tmp_path, None)):
        steps(saver, TrainState(), alone, 1, 5)
        saver.load(TrainState()._core)
        saver.wait()
    Saver(None, None).keep(Tag(1, 5), TrainState()._core, alone)
    assert checkpoint.tags(tmp_path) == []


def test_keep_writes_the_last_state_unless_its_tag_is_none(tmp_path: Path, alone: Group) -> None:
    saver = Saver(tmp_path, None)
    saver.keep(None, TrainState()._core, alone)
    assert checkpoint.tags(tmp_path) == []
    saver.keep(Tag(1, 5), TrainState()._core, alone)
    assert checkpoint.tags(tmp_path) == [Tag(1, 5)]


def test_a_repeated_step_is_copied_once(tmp_path: Path, alone: Group) -> None:
    state, saver = TrainState(), Saver(tmp_path, 1)
    for attempt in range(3):
        saver.begin(Tag(1, 1), state._core, alone)
        state.step = attempt  # an undone step leaves no trace; this one shows when the copy was made
    saver.commit(1)
    saver.wait()
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found.state["step"] == 0


def test_no_checkpoint_is_written_before_its_step_is_committed(tmp_path: Path, alone: Group) -> None:
    saver = Saver(tmp_path, 2)
    saver.begin(Tag(1, 2), TrainState()._core, alone)
    saver.commit(1)
    saver.wait()
    assert checkpoint.tags(tmp_path) == []
    saver.commit(2)
    saver.wait()
    assert checkpoint.tags(tmp_path) == [Tag(1, 2)]


def test_a_copy_of_a_failed_generation_is_not_written(tmp_path: Path, alone: Group) -> None:
    saver = Saver(tmp_path, 2)
    saver.begin(Tag(1, 2), TrainState()._core, alone)  # then the generation fails, and the line goes on from its step 1
    saver.begin(Tag(2, 1), TrainState()._core, alone)
    saver.begin(Tag(2, 2), TrainState()._core, alone)
    saver.commit(2)
    saver.wait()
    assert checkpoint.tags(tmp_path) == [Tag(2, 2)]


def test_a_member_that_lost_the_writer_role_drops_its_old_copy(tmp_path: Path) -> None:
    with world_of(2) as groups:
        saver = Saver(tmp_path, 2)
        saver.begin(Tag(1, 2), TrainState()._core, groups[0])
        saver.begin(Tag(2, 2), TrainState()._core, groups[1])
        saver.commit(2)
        saver.wait()
        assert checkpoint.tags(tmp_path) == []


def test_lowest_rank_of_each_host_writes(tmp_path: Path) -> None:
    with world_of(4) as groups:
        for group in groups:
            mesh = local_mesh(group._core.mesh)
            mesh.peers = [replace(peer, host="ab"[peer.rank // 2]) for peer in mesh.peers]

        def save(group: Group) -> None:
            folder = tmp_path / str(group.rank)
            saver = Saver(folder, 1)
            saver.begin(Tag(1, 1), TrainState()._core, group)
            saver.commit(1)
            saver.keep(Tag(1, 2), TrainState()._core, group)
            saver.wait()

        assert each(groups, save) == [None] * 4
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]
        assert checkpoint.tags(tmp_path / "2") == [Tag(1, 1), Tag(1, 2)]


@pytest.mark.parametrize("shared", [True, False])
def test_hosts_that_share_the_directory_write_once(shared: bool, tmp_path: Path, monkeypatch: Any) -> None:
    written: list[Tag] = []

    def writing(directory: Path, tag: Tag, *more: Any) -> Any:
        written.append(tag)
        return write_part(directory, tag, *more)

    monkeypatch.setattr(keep, "write_part", writing)
    with world_of(8, "abcdefgh") as groups:

        def train(group: Group) -> None:
            folder = tmp_path if shared else tmp_path / str(group.rank)
            state, saver = TrainState(), Saver(folder, 2)
            saver.begin(Tag(1, 2), state._core, group)
            saver.commit(2)
            saver.wait()
            saver.keep(Tag(1, 3), state._core, group)
            assert checkpoint.tags(folder)[-1] == Tag(1, 3)

        assert each(groups, train) == [None] * 8
    times = 1 if shared else 8
    assert (written.count(Tag(1, 2)), written.count(Tag(1, 3)), len(written)) == (times, times, 2 * times)
    assert not list(tmp_path.glob("**/.writing-*"))


def test_the_next_generation_writes_an_unfinished_checkpoint(tmp_path: Path) -> None:
    with world_of(3, "abc") as groups:
        folder.open_folder(tmp_path, Tag(1, 2), saver_module._attempt(groups[0]))  # and the worker was killed
        for group, mesh in zip(groups, next_meshes([local_mesh(group._core.mesh) for group in groups]), strict=True):
            group._core.move(mesh)
        keeping = each(groups, lambda group: Saver(tmp_path, None).keep(Tag(1, 2), TrainState()._core, group))
        assert keeping == [None] * 3
        assert checkpoint.tags(tmp_path) == [Tag(1, 2)]


def test_a_greater_tag_of_another_run_does_not_prevent_writing(tmp_path: Path, alone: Group) -> None:
    for step in (400, 500):
        checkpoint.save(tmp_path, TrainState().state_dict(), Tag(9, step))
    saver = Saver(tmp_path, 2)
    saver.load(TrainState()._core)
    assert saver.tag == Tag(9, 500)
    saver.begin(Tag(4, 2), TrainState()._core, alone)  # it was given the state of another line
    saver.commit(2)
    saver.wait()
    assert checkpoint.tags(tmp_path) == [Tag(4, 2), Tag(9, 400), Tag(9, 500)]


def test_fingerprints_distinguish_checkpoints_of_one_tag(tmp_path: Path) -> None:
    fingerprints = []
    for run, value in enumerate([1.0, 1.0, 2.0]):
        state = TrainState(values={"n": np.full(3, value)})
        checkpoint.save(tmp_path / str(run), state.state_dict(), Tag(2, 12))
        saver = Saver(tmp_path / str(run), None)
        saver.load(state._core)
        fingerprints.append(saver.fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert Saver(tmp_path, None).fingerprint == b""


def test_keep_last_writes_on_another_rank_if_the_lowest_is_lost(tmp_path: Path) -> None:
    with world_of(2) as groups:
        groups[1]._core.mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_LOST, 0, 0, "rank 0 is gone"))
        Saver(tmp_path, None).keep_last(Tag(1, 4), TrainState()._core, groups[1])
        assert checkpoint.tags(tmp_path) == [Tag(1, 4)]


def test_a_checkpoint_is_skipped_while_the_previous_is_being_written(
    tmp_path: Path, alone: Group, monkeypatch: Any, caplog: Any
) -> None:
    go_on, save = threading.Event(), checkpoint.save

    def slow(*args: Any) -> Any:
        assert go_on.wait(10)
        return save(*args)

    monkeypatch.setattr(checkpoint, "save", slow)
    saver = Saver(tmp_path, 1)
    steps(saver, TrainState(), alone, 1, 3)
    assert "no checkpoint of step 2: the previous one is still being written" in caplog.text
    go_on.set()
    saver.wait()
    assert checkpoint.tags(tmp_path) == [Tag(1, 1)]


def test_an_existing_checkpoint_is_not_counted_again(tmp_path: Path, alone: Group) -> None:
    counters = MemberCounters()
    for _ in range(2):
        Saver(tmp_path, None, counters).keep(Tag(1, 5), TrainState()._core, alone)
    assert (counters.read({}).checkpoints, counters.read({}).checkpoint_step) == (1, 5)


def test_a_write_error_is_raised_once_and_counted(tmp_path: Path, alone: Group, monkeypatch: Any) -> None:
    def full(*args: Any) -> Any:
        raise OSError("no space")

    monkeypatch.setattr(checkpoint, "save", full)
    counters = MemberCounters()
    saver = Saver(tmp_path, 1, counters)
    steps(saver, TrainState(), alone, 1, 2)
    with pytest.raises(OSError, match="no space"):
        saver.wait()
    saver.wait()  # told once
    with pytest.raises(OSError, match="no space"):
        saver.keep(Tag(1, 5), TrainState()._core, alone)
    counted = counters.read({})
    assert (counted.checkpoints, counted.checkpoint_failures) == (0, 2)


def test_keep_returns_only_after_the_checkpoint_is_durable(tmp_path: Path) -> None:
    with world_of(2) as groups:
        through = threading.Event()

        def late() -> list[Tag]:
            through.wait(0.3)  # it would have come to that by now
            Saver(tmp_path, None).keep(Tag(1, 5), TrainState()._core, groups[0])
            return []

        def early() -> list[Tag]:
            Saver(tmp_path, None).keep(Tag(1, 5), TrainState()._core, groups[1])
            through.set()
            return checkpoint.tags(tmp_path)

        assert at_once([late, early]) == [[], [Tag(1, 5)]]


def test_a_member_without_a_directory_takes_part_in_keep(tmp_path: Path) -> None:
    with world_of(2) as groups:
        savers = [Saver(tmp_path, None), Saver(None, None)]
        doings = [lambda n=n: savers[n].keep(Tag(1, 5), TrainState(), groups[n]) for n in range(2)]
        assert at_once(doings) == [None, None]
        assert checkpoint.tags(tmp_path) == [Tag(1, 5)]


@pytest.mark.parametrize("last", [False, True])
def test_all_members_get_checkpoint_failed_if_the_write_fails(last: bool, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*args: Any) -> Any:
        raise OSError("no space")

    monkeypatch.setattr(checkpoint, "save", full)
    with world_of(3) as groups:
        save = Saver.keep_last if last else Saver.keep
        errors = each(groups, lambda group: save(Saver(tmp_path, None), Tag(1, 5), TrainState()._core, group))
        assert {type(error) for error in errors} == {CheckpointFailed}
        assert "no space" in str(errors[0])
        assert "rank 0 (local)" in str(errors[1]) == str(errors[2])


def test_an_earlier_write_error_does_not_fail_a_keep_by_another_writer(
    tmp_path: Path, monkeypatch: Any, alone: Group
) -> None:
    """A member that wrote before it was cut off, and came back behind another of its host."""

    def full(*args: Any) -> Any:
        raise OSError("no space")

    back = Saver(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        steps(back, TrainState(), alone, 1, 2)
        assert back._thread is not None
        back._thread.join()
    with world_of(2) as groups:
        savers = [Saver(tmp_path, 1), back]
        doings = [lambda n=n: savers[n].keep(Tag(2, 5), TrainState(), groups[n]) for n in range(2)]
        assert at_once(doings) == [None, None]
    assert checkpoint.tags(tmp_path) == [Tag(2, 5)]


def test_keep_last_succeeds_though_the_writer_is_lost(tmp_path: Path) -> None:
    with world_of(3) as groups:
        through = threading.Event()

        def leave(group: Group) -> None:
            if group.rank == 0:  # it was to write
                through.wait(0.3)  # the others would have gone by now
                group._core.mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_LOST, 0, 0, "killed"))
                return
            Saver(tmp_path, None).keep_last(Tag(1, 5), TrainState()._core, group)
            through.set()

        assert each(groups, leave) == [None] * 3
        assert checkpoint.tags(tmp_path) == [Tag(1, 5)]


def test_load_takes_the_latest_undamaged_checkpoint(tmp_path: Path, alone: Group, caplog: Any) -> None:
    state = TrainState(values={"n": np.ones(1)})
    for step in (1, 2):
        state.step = step
        Saver(tmp_path, None).keep(Tag(1, step), state._core, alone)
    (tmp_path / str(Tag(1, 2)) / "arrays.safetensors").write_bytes(b"x")
    state.step, saver = 0, Saver(tmp_path, 1)
    saver.load(state._core)
    assert (state.step, saver.tag) == (1, Tag(1, 1))
    assert "g00000001-s0000000002 is left out" in caplog.text
    saver.begin(Tag(1, 1), state._core, alone)
    saver.commit(1)
    saver.wait()  # what was loaded is not written again
    with pytest.raises(SizeMismatch):
        Saver(tmp_path, None).load(TrainState(other={})._core)
    (tmp_path / str(Tag(1, 1)) / "manifest.json").write_bytes(b"x")
    with pytest.raises(CheckpointDamaged):
        Saver(tmp_path, None).load(state._core)
    empty = Saver(tmp_path / "nothing", None)
    empty.load(state._core)
    assert empty.tag == Tag(0, 0)


@pytest.mark.parametrize(("directory", "every"), [("d", 0), ("d", -1), (None, 3)])
def test_bad_arguments_are_refused(directory: str | None, every: int) -> None:
    with pytest.raises(ValueError, match="checkpoint_every"):
        Saver(directory, every)
