"""A crash at each system call of a write, with all that was not synced lost: the last good checkpoint is there.

A child process writes; what it asks of the system is counted, and at the n-th call it ends as by SIGKILL, after half of
that call if it is a write. Then the power fails too: files that were not synced are emptied, and names that were not
are gone.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import checkpoint
from paceline.checkpoint.folder import open_folder, publish
from paceline.checkpoint.pieces import pieces_of
from paceline.checkpoint.tree import split
from paceline.checkpoint.writing import write_part
from paceline_protocol import Tag

CALLS = ("open", "write", "fdatasync", "fsync", "close", "mkdir", "rename", "listdir", "unlink", "rmdir", "stat")

CRASH = """
import itertools, os, sys
from pathlib import Path
import numpy as np
from unit.checkpoint.test_crash import CALLS, save_alone, save_together

directory, save = Path(sys.argv[1]), {"alone": save_alone, "together": save_together}[sys.argv[2]]

def crash_at(n):
    real = {name: getattr(os, name) for name in CALLS}
    dup, readlink = os.dup, os.readlink
    unsynced = {}        # descriptor of our own -> [contents, name] are not yet on the disk
    count = 0
    def where(descriptor):
        return readlink(f"/proc/self/fd/{descriptor}")
    def power_fails():
        for descriptor, (contents, name) in unsynced.items():
            if contents:
                os.ftruncate(descriptor, 0)
            if name:
                real["unlink"](where(descriptor))
        os._exit(9)
    def counted(name):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == n:
                if name == "write":
                    real["write"](args[0], args[1][: len(args[1]) // 2])
                power_fails()
            result = real[name](*args, **kwargs)
            if name == "open" and args[1] & os.O_CREAT:
                unsynced[dup(result)] = [True, True]
            if name in ("fdatasync", "fsync"):
                path = where(args[0])
                for descriptor, state in unsynced.items():
                    if where(descriptor) == path:
                        state[0] = False
                    if os.path.dirname(where(descriptor)) == path:
                        state[1] = False
            return result
        return call
    for name in CALLS:
        setattr(os, name, counted(name))

for n in itertools.count(1):
    here = directory / str(n)
    for step in (10, 20):
        save(here, step)
    child = os.fork()
    if not child:
        crash_at(n)
        save(here, 30)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(n, code)
    if code == 0:
        break
"""


def state(step: int) -> dict[str, Any]:
    return {"step": step, "weights": np.full((50, 20), step, np.float32), "half": np.full(7, step, np.float16)}


def save_alone(directory: Path, step: int) -> None:
    checkpoint.save(directory, state(step), (1, step), keep=1)


def save_together(directory: Path, step: int) -> None:
    """What three ranks do, one after the other."""
    tag, attempt = Tag(1, step), f"attempt{step}"
    skeleton, arrays = split(state(step))
    open_folder(directory, tag, attempt)
    parts = [write_part(directory, tag, attempt, rank, 3, pieces_of(arrays, rank, 3)) for rank in range(3)]
    publish(directory, tag, attempt, parts, skeleton)


def loaded(directory: Path) -> int:
    """The step whose state is there, whole."""
    found = checkpoint.load(directory)
    assert found is not None
    assert found.tag.step == found.state["step"]
    for path, array in state(found.tag.step).items():
        np.testing.assert_array_equal(found.state[path], array)
    return found.tag.step


@pytest.mark.parametrize("how", ["alone", "together"])
def test_a_crash_at_any_system_call_leaves_an_intact_checkpoint(tmp_path: Path, how: str) -> None:
    run = [sys.executable, "-c", CRASH, str(tmp_path), how]
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=50, env=os.environ | paths)
    codes = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(codes) > 20
    assert [code for _, code in codes] == [9] * (len(codes) - 1) + [0]
    steps = [loaded(tmp_path / str(n)) for n, _ in codes]
    assert steps == sorted(steps)  # the old one up to some call, the new one from there on
    assert set(steps) == {20, 30}
    for n, _ in codes:
        checkpoint.save(tmp_path / str(n), state(40), (1, 40), keep=1)
        assert loaded(tmp_path / str(n)) == 40


@pytest.mark.parametrize("name", ["write", "fdatasync", "fsync", "rename"])
def test_a_failing_disk_call_leaves_no_partial_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = getattr(os, name)
    for n in range(1, 99):
        here = tmp_path / str(n)
        save_alone(here, 10)
        count = 0

        def refuse(*args: Any, n: int = n) -> Any:
            nonlocal count
            count += 1
            if count == n:
                raise OSError(errno.ENOSPC, "no space left")
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            try:
                save_alone(here, 20)
            except OSError as error:
                told = error.errno
            else:
                told = None
        assert told == (errno.ENOSPC if count >= n else None)
        assert [path.name for path in here.iterdir() if path.name.startswith(".")] == []
        assert loaded(here) == (20 if (here / str(Tag(1, 20))).exists() else 10)
        if count < n:
            break
    assert 1 < n < 99
    assert loaded(here) == 20
