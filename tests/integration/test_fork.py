"""A process that forks after `join`: its children live, may not use the session, and do not hide its death.

They do not free what it has left to its garbage collector either: destructors of grpc and torch wait for threads that a
child does not have.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = pytest.mark.alone

FORKING = """
import gc

class Garbage:
    def __init__(self):
        self.cycle = self

    def __del__(self):
        emit("freed", by=os.getpid())

gc.disable()
with paceline.join() as session:
    session.group.all_reduce(np.ones(10))
    Garbage()
    child = os.fork()
    if child == 0:
        gc.collect()
        calls = {
            "all_reduce": lambda: session.group.all_reduce(np.ones(3)),
            "store": lambda: session.store.set("k", b"v"),
            "barrier": lambda: session.barrier("b"),
            "leave": session.leave,
        }
        for what, call in calls.items():
            try:
                call()
                emit("worked", what=what)
            except RuntimeError as error:
                emit("refused", what=what, type=type(error).__name__)
        try:
            paceline.join(timeout=1.0)
        except paceline.ForkedSession as error:
            emit("refused", what="join", type=type(error).__name__)
        mine, theirs = __import__("socket").socketpair()
        mine.send(b"x")
        emit("own sockets work", got=theirs.recv(1).decode())
        signal.pause()
        os._exit(0)
    emit("forked", rank=session.rank, child=child)
    session.group.all_reduce(np.ones(10))
    emit("still fine")
    gc.collect()
    wait_for_go()
"""

WATCHING = """
with paceline.join() as session:
    for _ in range(2):
        session.group.all_reduce(np.ones(10))
    emit("joined", rank=session.rank)
    try:
        session.group.all_reduce(np.ones(10))
    except paceline.PacelineError as error:
        emit_error(error)
"""


def test_a_forked_child_cannot_use_the_session_or_hide_its_parents_death() -> None:
    with (
        coordinator() as address,
        workers(1, WATCHING, COORDINATOR=address, MIN_WORKERS="2") as (watcher,),
        workers(1, FORKING, COORDINATOR=address, MIN_WORKERS="2") as (parent,),
    ):
        events = [parent.expect_any() for _ in range(9)]
        child = next(event["child"] for event in events if event["event"] == "forked")
        try:
            refused = [event for event in events if event["event"] == "refused"]
            assert {event["type"] for event in refused} == {"ForkedSession"}
            assert len(refused) == 5
            assert [event["by"] for event in events if event["event"] == "freed"] == [parent.process.pid]
            assert {"own sockets work", "still fine"} <= {event["event"] for event in events}
            watcher.expect("joined")
            killed = parent.signal(signal.SIGKILL)
            error = watcher.expect("error")
            assert error["type"] == "PeerLost"
            assert error["at"] - killed < 1.0
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_worker_can_run_forked_multiprocessing_pools() -> None:
    code = """
import multiprocessing

def square(x):
    return x * x

with paceline.join() as session:
    context = multiprocessing.get_context("fork")
    for _ in range(6):
        with context.Pool(2) as pool:
            assert pool.map(square, range(10)) == [x * x for x in range(10)]
        session.group.all_reduce(np.ones(1000))
    emit("done")
"""
    start = time.monotonic()
    with coordinator() as address, workers(2, code, COORDINATOR=address, MIN_WORKERS="2") as started:
        for worker in started:
            worker.expect("done", timeout=30.0)
            assert worker.wait() == 0, worker.stderr
    assert time.monotonic() - start < 30.0
