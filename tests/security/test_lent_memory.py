"""Memory that a peer lends: it names a number, and chooses neither whose it is nor what is opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline._elastic import parcel
from paceline._elastic.parcel import Parcel, borrow
from paceline._links.base import Peer
from paceline._links.shm.segment import SegmentError
from paceline._session.identity import process_identity
from pacelinepb.v1 import peer_pb2
from support.processes import Worker

HERE = process_identity()
GIVER = Peer(1, "giver", "here", pid=HERE.pid, start_ticks=HERE.start_ticks)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `borrow` has opened, and not only looked at."""
    found: list[str] = []
    real = os.open

    def noting(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if "/fd/" in str(path) and not flags & os.O_PATH:
            found.append(os.readlink(path))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(parcel.os, "open", noting)
    return found


def lent() -> tuple[Parcel, peer_pb2.LentMemory]:
    made = Parcel([np.arange(100_000)])
    memory = made.lend(HERE)
    assert memory is not None
    return made, memory


def test_memory_lent_by_the_giver_can_be_borrowed(opened: list[str]) -> None:
    made, memory = lent()
    found = borrow(memory, len(made.data), GIVER)
    assert found.view[memory.offset : memory.offset + len(made.data)] == made.data
    assert opened == ["/memfd:paceline (deleted)"]


def test_memory_of_another_process_is_refused(opened: list[str]) -> None:
    """As root, or as the same user, it could be any process of this machine."""
    code = """
import os
from paceline._elastic.parcel import Parcel
from paceline._session.identity import process_identity
made = Parcel([np.ones(100_000)])
memory = made.lend(process_identity())
emit("lent", pid=os.getpid(), descriptor=memory.descriptor, size=memory.size)
wait_for_go()
"""
    worker = Worker(code, {})
    try:
        said = worker.expect("lent")
        memory = peer_pb2.LentMemory(pid=said["pid"], descriptor=said["descriptor"], size=said["size"])
        with pytest.raises(SegmentError, match=f"names memory of another process, {said['pid']}"):
            borrow(memory, 8, GIVER)
        assert opened == []
        theirs = process_identity(said["pid"])
        borrow(memory, 8, Peer(2, "other", "here", pid=theirs.pid, start_ticks=theirs.start_ticks))
        worker.go()
        assert worker.wait() == 0
    finally:
        worker.close()


@pytest.mark.parametrize(
    "giver",
    [
        Peer(1, "giver", "here", pid=HERE.pid, start_ticks=HERE.start_ticks + 1),
        Peer(1, "giver", "here", pid=HERE.pid),
        Peer(1, "giver", "here"),
    ],
    ids=["another process has its pid", "who knows when it began", "unknown"],
)
def test_a_giver_must_match_the_process_start_time(giver: Peer, opened: list[str]) -> None:
    _, memory = lent()
    with pytest.raises(SegmentError):
        borrow(memory, 8, giver)
    assert opened == []


def test_only_paceline_shared_memory_is_opened(tmp_path: Path, opened: list[str]) -> None:
    """To open a FIFO wakes whoever waits at its other end; to open a device may do anything."""
    path = tmp_path / "memfd:paceline (deleted)"
    path.write_bytes(bytes(4096))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    made = [
        os.open(path, os.O_RDONLY),
        os.open(fifo, os.O_RDONLY | os.O_NONBLOCK),
        os.open("/dev/null", os.O_RDONLY),
        os.memfd_create("another"),
        os.open("/proc/self/fd", os.O_RDONLY),
    ]
    opened.clear()
    try:
        for descriptor in made:
            with pytest.raises(SegmentError, match="not Paceline's shared memory"):
                borrow(peer_pb2.LentMemory(pid=HERE.pid, descriptor=descriptor, size=4096), 1, GIVER)
        with pytest.raises(OSError, match="No such file"):
            borrow(peer_pb2.LentMemory(pid=HERE.pid, descriptor=1 << 30, size=4096), 1, GIVER)
        assert opened == []
    finally:
        for descriptor in made:
            os.close(descriptor)
