"""A block that one process of each host runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline


def test_the_first_alone_is_told_so(tmp_path: Path) -> None:
    for expected in (True, False, False):
        with paceline.once_per_host(tmp_path / "new" / "downloaded") as first:
            assert first is expected


def test_a_block_that_raised_has_yet_to_be_done(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no route"), paceline.once_per_host(tmp_path / "file"):
        raise ValueError("no route to the data")
    with paceline.once_per_host(tmp_path / "file") as first:
        assert first


def test_it_is_run_again_once_its_file_is_gone(tmp_path: Path) -> None:
    for _ in range(2):
        with paceline.once_per_host(tmp_path / "file") as first:
            assert first
        (tmp_path / "file").unlink()
