"""Waits that a signal can always interrupt, and the event loop thread of the process.

**Waits.** Python runs signal handlers in the main thread, between two instructions. If a signal arrives just before
that thread blocks in a lock, Python only notes it and nothing wakes the thread: Ctrl-C would have no effect until the
wait ends. So a user's thread never blocks for longer than half a second at a time. `interrupts` sees to a Ctrl-C that
Python drops.

**The loop.** All of grpc.aio runs on one thread behind synchronous interfaces. There is one loop for all sessions (and
for a coordinator that the process embeds), because aio objects belong to the loop that made them, and grpc polls best
for one loop. The thread is a daemon and starts when it is first used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import Future
from time import monotonic
from typing import Any, Generic, TypeVar

from paceline._base.addresses import is_exhausted
from paceline._base.interrupts import repeat_dropped_interrupts
from paceline._base.rpc import hold_aio

T = TypeVar("T")

SLICE = 0.5
"""Seconds that a thread blocks at a time: the longest delay of a signal handler."""


def wait_in_slices(wait: Callable[[float], object], timeout: float | None) -> bool:
    """Calls `wait` with short timeouts until it returns true or `timeout` seconds are over; returns whether it did."""
    deadline = None if timeout is None else monotonic() + timeout
    while True:
        left = SLICE if deadline is None else max(0.0, min(SLICE, deadline - monotonic()))
        if wait(left):
            return True
        if deadline is not None and monotonic() >= deadline:
            return False


class Latch:
    """An event that is set once, and stays usable if an interrupt hits a waiting thread at any instruction.

    `threading.Event` has a lock that both sides take. A waiter that is interrupted just after acquiring it keeps it,
    and the thread that wants to set the event blocks for ever (a `Future` did so within 213 interrupts). Here a waiter
    takes no lock that `set` needs.
    """

    def __init__(self) -> None:
        self._setting = threading.Lock()  # `with` enters it in C: an interrupt cannot leave it locked
        self._gate = threading.Lock()  # locked until `set`
        self._gate.acquire()
        self._is_set = False

    def is_set(self) -> bool:
        """Returns True after `set`."""
        return self._is_set

    def set(self) -> None:
        """Sets the event and wakes all waiters. Idempotent."""
        with self._setting:
            if not self._is_set:
                self._is_set = True
                self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for `set`, at most `timeout` seconds; returns True if the event is set."""
        return wait_in_slices(self._pass, timeout)

    def _pass(self, seconds: float) -> bool:
        if not self._is_set and self._gate.acquire(timeout=seconds):
            self._gate.release()  # lets the next waiter pass
        return self._is_set


class Outcome(Generic[T]):
    """A result or an error that one thread sets once and others wait for: a `Latch` with a value."""

    def __init__(self) -> None:
        self._latch = Latch()
        self._value: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Returns True if the result or the error is set."""
        return self._latch.is_set()

    def set_result(self, value: T) -> None:
        """Sets the result."""
        self._value = value
        self._latch.set()

    def set_exception(self, error: BaseException) -> None:
        """Sets the error."""
        self._error = error
        self._latch.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the result or the error, at most `timeout` seconds; returns True if one is set."""
        return self._latch.wait(timeout)

    def result(self) -> T:
        """Returns the result, or raises the error that was set."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class LoopThread:
    """A daemon thread that runs an asyncio loop for as long as the process lives."""

    def __init__(self) -> None:
        # The loop is made in its own thread: Ctrl-C reaches the main thread only, and would leave a loop half made.
        made: Future[asyncio.AbstractEventLoop] = Future()
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._thread = threading.Thread(target=self._run, args=(made,), name="paceline-loop", daemon=True)
        self._thread.start()
        self.loop = made.result()

    def _run(self, made: Future[asyncio.AbstractEventLoop]) -> None:
        try:
            loop = asyncio.new_event_loop()
        except BaseException as error:  # noqa: BLE001  most likely no descriptor is left; `__init__` raises it
            made.set_exception(error)
            return
        asyncio.set_event_loop(loop)
        loop.set_exception_handler(self._on_exception)
        loop.call_soon(self._begin, loop, made)
        while True:
            try:
                loop.run_forever()
            except BaseException as error:  # noqa: BLE001  asyncio itself failed; leaving the job still needs the loop
                self._report(error)
            else:  # the loop was stopped
                loop.close()
                return

    @staticmethod
    def _begin(loop: asyncio.AbstractEventLoop, made: Future[asyncio.AbstractEventLoop]) -> None:
        """Starts grpc.aio; runs on the loop before anything else."""
        try:
            hold_aio()
        except BaseException as error:  # noqa: BLE001  most likely no thread is left; `__init__` raises it
            made.set_exception(error)
            loop.stop()
        else:
            made.set_result(loop)

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Calls a function, on the loop, whenever work there fails because memory, threads or descriptors ran out.

        Which work was left undone is unknown then, so a session must not go on with this loop.
        """
        self._callbacks.append(callback)

    def forget(self, callback: Callable[[BaseException], None]) -> None:
        """Removes a function that `on_failure` was given."""
        with contextlib.suppress(ValueError):
            self._callbacks.remove(callback)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handles the error of a callback, or of a task whose result was never read."""
        error = context.get("exception")
        if isinstance(error, BaseException) and is_exhausted(error):
            self._report(error)
        loop.default_exception_handler(context)

    def _report(self, error: BaseException) -> None:
        for callback in list(self._callbacks):
            callback(error)

    @property
    def is_current(self) -> bool:
        """True in code that runs on the loop, which must not wait for the loop."""
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop; callable from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None, *, keep: bool = False) -> T:
        """Runs a coroutine on the loop and waits for its result; the coroutine should bound its own time.

        If the wait ends early, the coroutine is cancelled; with `keep` it goes on.

        Raises:
            TimeoutError: the coroutine took longer than `timeout` seconds.
            concurrent.futures.CancelledError: the coroutine was cancelled.
        """
        assert not self.is_current, "the loop cannot wait for itself"
        outcome: Outcome[T] = Outcome()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            try:
                tasks.append(self.loop.create_task(work))
                tasks[0].add_done_callback(end)
            except BaseException as error:  # noqa: BLE001  no memory is left; `result` raises it
                outcome.set_exception(error)

        def end(task: asyncio.Task[T]) -> None:
            tasks.clear()  # frees the task here: freed elsewhere, it calls asyncio, where an interrupt would be lost
            if task.cancelled():
                outcome.set_exception(futures.CancelledError())
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        try:
            self.loop.call_soon_threadsafe(begin)
            if not outcome.wait(timeout):
                raise TimeoutError(f"no answer within {timeout} s")
        except BaseException:
            if not keep:
                self.loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            raise
        return outcome.result()


_lock = threading.Lock()
_current: tuple[int, LoopThread] | None = None


def has_loop_thread() -> bool:
    """True if this process uses grpc, or has used it. grpc does not survive a fork."""
    return _current is not None


def loop_thread() -> LoopThread:
    """Returns the loop thread of this process; a forked child gets a new one."""
    global _current
    with _lock:
        if _current is None or _current[0] != os.getpid():
            _current = (os.getpid(), LoopThread())
            repeat_dropped_interrupts(_current[1].loop)
        return _current[1]
