"""No wait of a user's thread sleeps for longer than a moment at a time, so that no signal is lost for longer."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import threading
from time import monotonic
from typing import Any
from unittest import mock

import pytest

from paceline._base import waits as _wait
from paceline._base.waits import SLICE, Latch, Outcome, loop_thread, wait_in_slices
from paceline._base.work import Work
from paceline._links.base import LinkTimeout
from paceline._links.fault import Fault
from paceline._links.grpc_kind import GrpcIncoming


def test_wait_in_slices_ends_on_success_or_at_the_timeout() -> None:
    asked: list[float] = []

    def third(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) == 3

    assert wait_in_slices(third, None)
    assert asked == [SLICE] * 3
    assert not wait_in_slices(lambda seconds: False, 0.0)
    assert not wait_in_slices(lambda seconds: False, -1.0)


@pytest.mark.parametrize(("timeout", "slices"), [(0.05, [0.05]), (SLICE + 0.1, [SLICE, 0.1])])
def test_wait_in_slices_lasts_exactly_its_timeout(
    timeout: float, slices: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(_wait, "monotonic", lambda: sum(slept))
    assert not wait_in_slices(slept.append, timeout)
    assert slept == pytest.approx(slices)


def test_link_receive_and_work_wait_in_slices() -> None:
    slept: list[Any] = []

    class Items(queue.SimpleQueue):  # type: ignore[type-arg]
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            slept.append(timeout)
            raise queue.Empty

    incoming = GrpcIncoming(mock.Mock(), Fault(1, 0, verdict_timeout=0.0))
    incoming._items = Items()
    with pytest.raises(LinkTimeout):
        incoming.recv(monotonic() + 0.01)
    work: Work[int] = Work(1, lambda: 7, lambda operation, error: None)
    assert slept
    assert all(0 <= seconds <= SLICE for seconds in slept)
    slept.clear()

    def acquire(timeout: float) -> bool:
        slept.append(timeout)
        work._over._is_set = len(slept) == 2
        return work._over._is_set

    with mock.patch.object(work._over, "_gate", mock.Mock(acquire=acquire)):
        work._result = 7
        assert work.wait() == 7
    assert len(slept) == 2
    assert all(0 <= seconds <= SLICE for seconds in slept)


STORM = """
import asyncio, random, signal, threading, time
from paceline._base.waits import loop_thread
from paceline._base.waits import Latch

class Interrupt(BaseException):
    pass

armed = False

def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise Interrupt

async def work(seconds):
    await asyncio.sleep(seconds)
    return seconds

def other_way(seconds):
    # by a latch that the loop tells of
    latch = Latch()
    thread.loop.call_soon_threadsafe(thread.loop.call_later, seconds, latch.set)
    latch.wait()
    return seconds

def loop_answers():
    answered = threading.Event()
    thread.loop.call_soon_threadsafe(answered.set)
    return answered.wait(5.0)

signal.signal(signal.SIGALRM, interrupt)
thread, rng, runs, hits = loop_thread(), random.Random(0), 0, 0
end = time.monotonic() + 2.0
while time.monotonic() < end or hits <= 100:
    runs += 1
    seconds = rng.choice([0, 2e-4])
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 4e-4))
        assert (thread.run(work(seconds)) if runs % 2 else other_way(seconds)) == seconds
        armed = False
    except Interrupt:
        hits += 1
    if runs % 20 == 0:
        armed = False
        assert loop_answers(), f"the loop hangs after {hits} interrupts"
armed = False
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_an_interrupt_at_any_instruction_of_a_wait_leaves_the_loop_running() -> None:
    done = subprocess.run([sys.executable, "-c", STORM], capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 0, done.stderr[-2000:]


def test_setting_a_latch_wakes_all_waiting_threads() -> None:
    latch, passed = Latch(), []
    threads = [threading.Thread(target=lambda: passed.append(latch.wait(10.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not latch.wait(0.0)
    latch.set()
    latch.set()
    for thread in threads:
        thread.join(10.0)
    assert passed == [True] * 4
    assert latch.is_set()


def test_an_outcome_gives_its_result_or_error_to_waiters() -> None:
    outcome: Outcome[int] = Outcome()
    assert not outcome.wait(0.0)
    assert not outcome.done()
    threading.Timer(0.01, outcome.set_result, (7,)).start()
    assert wait_in_slices(outcome.wait, 10.0)
    assert outcome.done()
    assert outcome.wait(0.0)
    assert outcome.result() == 7
    failed: Outcome[int] = Outcome()
    failed.set_exception(ValueError("so it ended"))
    assert failed.wait(0.0)
    with pytest.raises(ValueError, match="so it ended"):
        failed.result()


def test_run_cancels_its_work_at_the_timeout_unless_keep_is_set() -> None:
    ended: list[str] = []
    go, done = asyncio.Event(), threading.Event()

    async def work(name: str) -> None:
        try:
            await go.wait()
            ended.append(f"{name} done")
            done.set()
        except asyncio.CancelledError:
            ended.append(f"{name} cancelled")
            raise

    thread = loop_thread()
    for name, keep in (("one", False), ("two", True)):
        with pytest.raises(TimeoutError):
            thread.run(work(name), 0.01, keep=keep)
    thread.loop.call_soon_threadsafe(go.set)
    assert done.wait(10.0)
    assert ended == ["one cancelled", "two done"]
