"""What a worker tells its launcher goes into a pipe, and nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline._session.launcher_pipe import LAUNCHER_FD, tell_launcher


def test_a_record_is_written_to_the_pipe_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    out, into = os.pipe()
    monkeypatch.setenv(LAUNCHER_FD, str(into))
    assert tell_launcher("view", {"rank": 3})
    assert json.loads(os.read(out, 4096)) == {"kind": "view", "rank": 3}
    os.close(out)
    os.close(into)


@pytest.mark.parametrize("fd", [None, "nonsense", "999999"])
def test_tell_launcher_without_a_pipe_returns_false(fd: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHER_FD, raising=False)
    if fd is not None:
        monkeypatch.setenv(LAUNCHER_FD, fd)
    assert not tell_launcher("view", {})


def test_a_regular_file_at_the_descriptor_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "precious").open("wb") as file:
        monkeypatch.setenv(LAUNCHER_FD, str(file.fileno()))
        assert not tell_launcher("view", {})
    assert (tmp_path / "precious").read_bytes() == b""
