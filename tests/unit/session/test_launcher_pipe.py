"""What a worker tells its launcher goes into a pipe, and nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline._session.launcher_pipe import LAUNCHER_FD, tell_launcher


def test_a_record_arrives_as_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out, into = os.pipe()
    monkeypatch.setenv(LAUNCHER_FD, str(into))
    assert tell_launcher("view", {"rank": 3})
    assert json.loads(os.read(out, 4096)) == {"kind": "view", "rank": 3}
    os.close(out)
    os.close(into)


@pytest.mark.parametrize("fd", [None, "nonsense", "999999"])
def test_without_a_pipe_nothing_is_told(fd: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHER_FD, raising=False)
    if fd is not None:
        monkeypatch.setenv(LAUNCHER_FD, fd)
    assert not tell_launcher("view", {})


def test_a_file_that_has_taken_the_number_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "precious").open("wb") as file:
        monkeypatch.setenv(LAUNCHER_FD, str(file.fileno()))
        assert not tell_launcher("view", {})
    assert (tmp_path / "precious").read_bytes() == b""
