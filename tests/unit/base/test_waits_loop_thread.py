"""The loop thread where the system gives it too little: whoever waits for it is told, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline._base import waits as _loop
from paceline._base.waits import LoopThread

SOON = 5.0


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopThread]:
    """One that grpc does not work on: it works on one loop of a process."""
    monkeypatch.setattr(_loop, "hold_aio", lambda: None)
    made = LoopThread()
    yield made
    made.loop.call_soon_threadsafe(made.loop.stop)
    made._thread.join()


def refuse(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_failure_to_create_the_loop_is_raised_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "new_event_loop", refuse(OSError(errno.EMFILE, "too many files")))
    with pytest.raises(OSError, match="too many files"):
        LoopThread()


def test_failure_to_start_grpc_is_raised_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loop, "hold_aio", refuse(RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        LoopThread()


def test_failure_to_start_work_is_raised_in_run(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread.loop, "create_task", refuse(MemoryError("planted")))
    work = asyncio.sleep(0)
    with pytest.raises(MemoryError, match="planted"):
        thread.run(work, SOON)
    work.close()


@pytest.mark.parametrize("error", [MemoryError("planted"), OSError(errno.EMFILE, "too many files")])
def test_resource_exhaustion_in_a_callback_calls_on_failure(
    thread: LoopThread, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    heard, told = [], threading.Event()
    thread.on_failure(lambda what: (heard.append(what), told.set()))
    thread.loop.call_soon_threadsafe(refuse(ValueError("a bug, which is only logged")))
    thread.loop.call_soon_threadsafe(refuse(error))
    assert told.wait(SOON)
    assert heard == [error]
    assert "a bug, which is only logged" in caplog.text


def test_a_failing_loop_calls_on_failure_and_continues(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    select, error = thread.loop._selector.select, MemoryError("planted")  # type: ignore[attr-defined]
    heard, told = [], threading.Event()
    thread.on_failure(lambda what: (heard.append(what), told.set()))

    def fail_once(timeout: float | None) -> Any:
        if not heard:
            raise error
        return select(timeout)

    monkeypatch.setattr(thread.loop._selector, "select", fail_once)  # type: ignore[attr-defined]
    thread.loop.call_soon_threadsafe(lambda: None)
    assert told.wait(SOON)
    assert heard == [error]
    assert thread.run(asyncio.sleep(0, "it goes on"), SOON) == "it goes on"
