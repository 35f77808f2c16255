"""A worker that cannot be started leaves no descriptor open."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from paceline.cli.launcher.worker import StartedProcess, Worker


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("failing", ["news pipe", "pipe of a spare", "start"])
def test_a_worker_that_cannot_be_started_leaves_no_descriptor(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = os.pipe
    left = {"news pipe": 0, "pipe of a spare": 1, "start": 2}[failing]

    def pipe_while_some_are_left() -> tuple[int, int]:
        nonlocal left
        if left == 0:
            raise OSError(errno.EMFILE, "too many open files")
        left -= 1
        return pipe()

    def start(*arguments: object) -> StartedProcess:
        raise OSError(errno.ENOENT, "no such program")

    monkeypatch.setattr(os, "pipe", pipe_while_some_are_left)
    before = open_descriptors()
    with pytest.raises(OSError, match=r"too many open files|no such program"):
        Worker(0, start, lambda news: {}, spare=True)
    assert open_descriptors() == before
