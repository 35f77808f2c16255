"""What C++ may ask of a work and of its future once `wait` has returned: it asserts that values are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.torch.backend import _messenger
from paceline.torch.backend._operation import FutureThreads, Operation, Promise

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest]


class Handle:
    """A collective whose end is heard of on another thread, and late: `release` is when."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.release = threading.Event()
        self.threads: list[threading.Thread] = []
        self._error = error

    def wait(self, timeout: float | None) -> None:
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return self._error

    def on_done(self, hear: Callable[[], None]) -> None:
        def run() -> None:
            self.release.wait()
            hear()

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()


class Unfinished(Handle):
    """One that is over only after `wait`."""

    waited = False

    def wait(self, timeout: float | None) -> None:
        self.waited = True

    def done(self) -> bool:
        return self.waited


def operation(handle: Handle, threads: FutureThreads) -> Operation:
    return Operation([handle], [torch.ones(2)], [], threads)  # type: ignore[list-item]


@pytest.mark.parametrize("kind", [Handle, Unfinished])
@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_future_has_its_value_after_wait(kind: type[Handle], asked: str) -> None:
    threads, handle = FutureThreads(), kind()
    work = operation(handle, threads)
    heard: list[object] = []
    if asked == "before":
        work.get_future().then(heard.append)
    work.wait()
    future = work.get_future()
    assert future.done()
    assert torch.equal(future.value()[0], torch.ones(2))
    handle.release.set()
    for thread in handle.threads:
        thread.join()
    threads.close()
    assert len(heard) == (asked == "before")


def test_a_callback_may_wait_for_its_own_work() -> None:
    threads, handle = FutureThreads(), Unfinished()
    work = operation(handle, threads)
    after = work.get_future().then(lambda _: work.wait())
    work.wait()
    assert after.wait()
    handle.release.set()
    for thread in handle.threads:
        thread.join()
    threads.close()


def test_wait_until_complete_waits_for_a_value_of_another_thread() -> None:
    entered, go = threading.Event(), threading.Event()

    def value() -> int:
        entered.set()
        go.wait()
        return 7

    promise = Promise(value)
    completer = threading.Thread(target=promise.complete)
    completer.start()
    entered.wait()
    waiter = threading.Thread(target=promise.wait_until_complete)
    waiter.start()
    assert not promise.future.done()
    go.set()
    waiter.join()
    assert promise.future.value() == 7
    completer.join()


@pytest.mark.parametrize("kind", ["message", "operation"])
def test_a_future_is_done_while_another_thread_sets_its_value(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for behind `wait`, while the thread that ran the work is inside of `set_result`."""
    giving, go = threading.Event(), threading.Event()

    class Given(Promise):
        """One that another thread completes once others may know of it; `wait_until_complete` lets that go on."""

        def wait_until_complete(self) -> None:
            go.set()
            super().wait_until_complete()

    def value() -> list[Any]:
        giving.set()
        go.wait()
        return []

    if kind == "message":

        class Promises(list[Promise]):
            def append(self, promise: Promise) -> None:
                super().append(promise)
                giver.start()
                giving.wait()

        monkeypatch.setattr(_messenger, "Promise", Given)
        message = _messenger.MessageWork(lambda: 0, _messenger._MessageQueue("to rank 1"), [])
        monkeypatch.setattr(message, "_value", value)
        message._promises = Promises()
        giver, ask = threading.Thread(target=message.run), message.get_future
    else:
        work = Operation([], [], [], FutureThreads())
        work._promise = promise = Given(value)
        giver, ask = threading.Thread(target=promise.complete), work.get_future
        giver.start()
        giving.wait()
    try:
        assert ask().done()
    finally:
        go.set()
        giver.join()
