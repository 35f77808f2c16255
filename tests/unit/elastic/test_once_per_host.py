"""A block that one process of each host runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline


def test_only_the_first_block_gets_true(tmp_path: Path) -> None:
    for expected in (True, False, False):
        with paceline.once_per_host(tmp_path / "new" / "downloaded") as first:
            assert first is expected


def test_a_block_that_raised_runs_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no route"), paceline.once_per_host(tmp_path / "file"):
        raise ValueError("no route to the data")
    with paceline.once_per_host(tmp_path / "file") as first:
        assert first


def test_a_block_runs_again_after_its_file_is_removed(tmp_path: Path) -> None:
    for _ in range(2):
        with paceline.once_per_host(tmp_path / "file") as first:
            assert first
        (tmp_path / "file").unlink()
