"""A launcher removes old files of processes that are gone, and nothing else."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from paceline._base.processes import user_folder
from paceline.cli.launcher.leftovers import OLD_S, compile_folder, remove_leftovers

GONE = 1 << 22
"""The pid of no process: Linux gives out smaller ones only."""


def later() -> float:
    """A time at which what is written now is old."""
    return time.time() + OLD_S + 60.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = user_folder("flight").parent
    for name in ("flight", "coordinators", "stacks"):
        (made / name).mkdir(parents=True, mode=0o700)
    return made


def written(path: Path) -> Path:
    path.write_text("x")
    return path


def test_old_files_of_dead_processes_are_removed(folder: Path) -> None:
    left = [
        written(folder / "flight" / f"digits.rank0.pid{GONE}.json"),
        written(folder / "flight" / f"digits.rank0.pid{GONE}.json.ab_1.tmp"),
        written(folder / "coordinators" / "127.0.0.1:7400"),
    ]
    remove_leftovers()
    assert all(path.exists() for path in left), "they are not a day old"
    remove_leftovers(later())
    assert not any(path.exists() for path in left)


def test_files_in_use_and_unrelated_files_are_kept(folder: Path) -> None:
    kept = [
        written(folder / "flight" / f"digits.rank0.pid{os.getpid()}.json"),
        written(folder / "flight" / f"a-note-about-pid{GONE}.txt"),
        written(folder / "stacks" / f"1.{GONE}.12"),
        written(folder / "coordinators" / "127.0.0.1:7400"),
    ]
    with kept[-1].open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_leftovers(later())
    assert all(path.exists() for path in kept)


def test_symbolic_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    record = written(elsewhere / f"digits.rank0.pid{GONE}.json")
    link = folder / "flight" / f"digits.rank1.pid{GONE}.json"
    link.symlink_to(record)
    remove_leftovers(later())
    assert link.is_symlink()
    link.unlink()
    (folder / "flight").rmdir()
    (folder / "flight").symlink_to(elsewhere)
    remove_leftovers(later())
    assert record.exists()


def test_remove_leftovers_without_a_folder_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    remove_leftovers(later())


def test_compile_folder_is_removed_with_its_launcher(folder: Path) -> None:
    with compile_folder() as mine:
        assert mine is not None
        written(mine / "half.so")
        remove_leftovers(later())
        assert (mine / "half.so").exists()
    assert not mine.exists()
    left = folder / "compiled" / "tmpkilled"
    left.mkdir()
    written(left / "half.so")
    remove_leftovers()
    assert left.exists(), "it is not a day old"
    remove_leftovers(later())
    assert not left.exists()


def test_compile_folder_is_none_where_the_folder_cannot_be_made(folder: Path) -> None:
    written(folder / "compiled")
    with compile_folder() as mine:
        assert mine is None
