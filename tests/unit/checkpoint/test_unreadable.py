"""Checkpoints that the system does not read: each is named with the reason, and the one before it is loaded."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import checkpoint
from paceline._elastic.saver import JointSaver
from paceline._group import Group
from paceline.checkpoint import Shard, Tag, load_sharded, save_sharded
from paceline.errors import CheckpointDamaged
from paceline.testing import run_ranks

OLD, NEW = Tag(1, 1), Tag(1, 2)
MANIFEST, ARRAYS = "manifest.json", "arrays.safetensors"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    for tag in (OLD, NEW):
        checkpoint.save(tmp_path, {"step": tag.step, "w": np.full(8, tag.step)}, tag)
    return tmp_path


def loop(path: Path) -> None:
    """Puts a symbolic link to itself in place of a file or folder."""
    os.rename(path, path.with_name(".aside"))
    path.symlink_to(path)


def file_for_folder(path: Path) -> None:
    """Puts a file in place of a folder."""
    os.rename(path, path.with_name(".aside"))
    path.write_text("")


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a system call fail for paths that contain some text. A mode of 000 would not stop root."""

    def patch(call: str, number: int, where: str) -> None:
        real = getattr(os, call)

        def failing(path: Any, *args: Any, **options: Any) -> Any:
            name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
            if where in name:
                raise OSError(number, os.strerror(number), *([] if isinstance(path, int) else [name]))
            return real(path, *args, **options)

        monkeypatch.setattr(os, call, failing)

    return patch


def falls_back(directory: Path, file: Path, reason: int, caplog: pytest.LogCaptureFixture) -> None:
    """The newest is named with the reason, and the one before it is loaded; if it is asked for, the error says it."""
    text = f"{file} cannot be read: {os.strerror(reason)}"
    with caplog.at_level(logging.ERROR, "paceline.checkpoint"):
        found = checkpoint.load(directory)
    assert found is not None
    assert (found.tag, found.state["step"]) == (OLD, 1)
    assert f"checkpoint {NEW} is left out: {text}" in caplog.text
    with pytest.raises(CheckpointDamaged, match=re.escape(text)):
        checkpoint.load(directory, NEW)


@pytest.mark.parametrize("name", ["", MANIFEST, ARRAYS])
def test_a_symbolic_link_loop_falls_back_to_the_previous_checkpoint(
    two: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = two / str(NEW)
    loop(folder / name)
    falls_back(two, folder / (name or MANIFEST), errno.ELOOP, caplog)


def test_a_file_in_place_of_the_folder_falls_back_to_the_previous(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    file_for_folder(two / str(NEW))
    falls_back(two, two / str(NEW) / MANIFEST, errno.ENOTDIR, caplog)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize(("call", "name"), [("open", MANIFEST), ("open", ARRAYS), ("preadv", ARRAYS)])
def test_an_io_error_falls_back_to_the_previous_checkpoint(
    two: Path, call: str, name: str, number: int, refuse: Any, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(call, number, f"{NEW}/{name}")
    falls_back(two, two / str(NEW) / name, number, caplog)


@pytest.mark.parametrize("spoil", [loop, file_for_folder])
def test_an_unreadable_checkpoint_is_written_again(two: Path, spoil: Callable[[Path], None]) -> None:
    spoil(two / str(NEW))
    checkpoint.save(two, {"step": 2}, NEW)
    assert checkpoint.load(two).state == {"step": 2}  # type: ignore[union-attr]
    checkpoint.save(two, {"step": 3}, (1, 3))  # what was put aside disturbs no later one
    assert checkpoint.tags(two) == [NEW, Tag(1, 3)]


def test_if_no_checkpoint_is_readable_the_error_names_each(two: Path, refuse: Any) -> None:
    loop(two / str(OLD))
    refuse("preadv", errno.EIO, f"{NEW}/{ARRAYS}")
    first, second = two / str(NEW) / ARRAYS, two / str(OLD) / MANIFEST
    with pytest.raises(CheckpointDamaged) as told:
        checkpoint.load(two)
    assert str(told.value) == (
        f"no checkpoint in {two} is intact: {first} cannot be read: Input/output error; "
        f"{second} cannot be read: Too many levels of symbolic links"
    )


def test_an_unlistable_directory_raises_instead_of_seeming_empty(tmp_path: Path, refuse: Any) -> None:
    directories = [tmp_path / name for name in ("file", "loop", "unmounted")]
    directories[0].write_text("")
    directories[1].symlink_to(directories[1])
    directories[2].symlink_to(tmp_path / "no such disk")
    refuse("listdir", errno.EACCES, "forbidden")
    for directory in [*directories, tmp_path / "forbidden"]:
        with pytest.raises(OSError, match=directory.name):
            checkpoint.load(directory)
        with pytest.raises(OSError, match=directory.name):
            checkpoint.tags(f"{directory}/")
        with pytest.raises(OSError, match=directory.name):
            JointSaver(directory, None).intact()


def test_joint_saver_raises_if_no_checkpoint_can_be_read(two: Path, refuse: Any) -> None:
    refuse("open", errno.EIO, f"{NEW}/{MANIFEST}")
    assert JointSaver(two, None).intact() == OLD
    loop(two / str(OLD))
    with pytest.raises(
        CheckpointDamaged, match=rf"{NEW}/{MANIFEST} .*Input/output error; .*{OLD}/{MANIFEST} .*Too many"
    ):
        JointSaver(two, None).intact()


@pytest.mark.parametrize("latest", [checkpoint.load, lambda two: JointSaver(two, None).intact()])
def test_the_latest_is_found_despite_concurrent_saves_and_removals(
    latest: Callable[[Path], Any], two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer that has listed the directory takes one that was written since, if those in its list are gone."""
    real = os.listdir

    def listed(path: Path) -> list[str]:
        names = real(path)
        monkeypatch.setattr(os, "listdir", real)
        for step in (3, 4):
            checkpoint.save(two, {"step": step}, (1, step))
        return names

    monkeypatch.setattr(os, "listdir", listed)
    found = latest(two)
    assert getattr(found, "tag", found) == Tag(1, 4)


def test_a_skipped_checkpoint_is_logged_once(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop(two / str(NEW) / ARRAYS)
    saver = JointSaver(two, None)
    assert [saver.latest() for _ in range(3)] == [OLD] * 3
    assert caplog.text.count("is left out") == 1


def ranks_load(two: Path, spoil: Callable[[Path], None]) -> list[Any]:
    """Returns what two ranks load, or their errors; rank 1 has a directory of its own, with links, which is spoiled."""
    other = two / "other"
    other.mkdir()
    for found in (OLD, NEW):
        (other / str(found)).symlink_to(two / str(found))
    spoil(other)

    def rank(group: Group) -> Any:
        try:
            found = load_sharded(two if group.rank == 0 else other, {}, group)
        except (CheckpointDamaged, OSError) as error:
            return error
        return None if found is None else found.tag

    return run_ranks(2, rank)


def spoiled(tag: Tag) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        (directory / str(tag)).unlink()
        (directory / str(tag)).symlink_to(directory / str(tag))

    return spoil


def test_all_ranks_fall_back_if_one_rank_cannot_read_the_newest(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert ranks_load(two, spoiled(NEW)) == [OLD, OLD]
    trouble = f"{two / 'other' / str(NEW) / MANIFEST} cannot be read: Too many levels of symbolic links"
    assert re.search(rf"{NEW} is left out: rank 1 on \S+: {re.escape(trouble)}", caplog.text)


def test_all_ranks_fall_back_if_one_rank_lacks_the_newest(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert ranks_load(two, lambda directory: (directory / str(NEW)).unlink()) == [OLD, OLD]
    assert re.search(rf"{NEW} is left out: rank 1 on \S+: .*{MANIFEST} is missing", caplog.text)


def test_all_ranks_name_the_rank_that_can_read_no_checkpoint(two: Path) -> None:
    def spoil(directory: Path) -> None:
        for tag in (OLD, NEW):
            spoiled(tag)(directory)

    first, second = ranks_load(two, spoil)
    assert isinstance(first, CheckpointDamaged)
    assert str(first).replace(str(two / "other"), "") == str(second).replace(str(two / "other"), "").replace(
        "no checkpoint in  is", f"no checkpoint in {two} is"
    )
    for tag in (OLD, NEW):
        assert re.search(rf"rank 1 on \S+: {two}/other/{tag}/{MANIFEST} cannot be read: Too many levels", str(first))


def replaced_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        os.rename(directory, directory.with_name("elsewhere"))
        make(directory)

    return spoil


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.symlink_to(path), "cannot be listed: Too many levels of symbolic links"),
        (lambda path: path.write_text(""), "cannot be listed: Not a directory"),
        (lambda path: path.mkdir(), f"{MANIFEST} is missing"),
    ],
)
def test_a_directory_unreadable_on_one_rank_raises_on_all_ranks(
    two: Path, make: Callable[[Path], None], words: str
) -> None:
    for error in ranks_load(two, replaced_by(make)):
        assert isinstance(error, CheckpointDamaged)
        assert re.search(rf"rank 1 on \S+: {two}/other.*{words}", str(error))


def test_all_ranks_fall_back_after_an_io_error_on_one_rank(tmp_path: Path, refuse: Any) -> None:
    """Rank 0 reads its file of the newest checkpoint without trouble, and uses the one before it all the same."""

    def save(group: Group) -> None:
        for step in (1, 2):
            save_sharded(tmp_path, {"w": Shard(np.full(4, step), 4 * group.rank, (8,))}, (1, step), group)

    run_ranks(2, save)
    refuse("preadv", errno.EIO, f"{NEW}/arrays-00001-of-00002")

    def load(group: Group) -> Any:
        found = load_sharded(tmp_path, {"w": Shard(np.empty(4), 4 * group.rank, (8,))}, group)
        assert found is not None
        with pytest.raises(CheckpointDamaged, match=r"rank 1 on .*arrays-00001-of-00002.* Input/output error"):
            load_sharded(tmp_path, {"w": Shard(np.empty(4), 4 * group.rank, (8,))}, group, NEW)
        return found.tag, found.state["w"].values.tolist()

    assert run_ranks(2, load) == [(OLD, [1] * 4)] * 2
