"""The one event loop thread of the process: everything of grpc.aio lives on it, behind synchronous faces.

One loop for all sessions (and for a coordinator that the process embeds), because aio objects belong to the loop that
made them and grpc polls for one loop best. The thread is a daemon and starts with its first use.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

from paceline._exhausted import is_exhausted
from paceline._grpc import hold_aio
from paceline._wait import Outcome

__all__ = ["LoopThread", "loop_thread"]

T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs an asyncio loop for as long as the process lives."""

    def __init__(self) -> None:
        # Made in its own thread: Ctrl-C reaches the main thread only, and a loop half made complains when it is freed.
        made: Future[asyncio.AbstractEventLoop] = Future()
        self._hearers: list[Callable[[BaseException], None]] = []
        self._thread = threading.Thread(target=self._run, args=(made,), name="paceline-loop", daemon=True)
        self._thread.start()
        self.loop = made.result()

    def _run(self, made: Future[asyncio.AbstractEventLoop]) -> None:
        try:
            loop = asyncio.new_event_loop()
        except BaseException as error:  # noqa: BLE001  no descriptor is left, most likely; raised where it was asked for
            made.set_exception(error)
            return
        asyncio.set_event_loop(loop)
        loop.set_exception_handler(self._on_exception)
        loop.call_soon(self._begin, loop, made)
        while True:
            try:
                loop.run_forever()
            except BaseException as error:  # noqa: BLE001  asyncio itself has failed; the goodbye still needs the loop
                self._tell(error)
            else:  # it was stopped
                loop.close()
                return

    @staticmethod
    def _begin(loop: asyncio.AbstractEventLoop, made: Future[asyncio.AbstractEventLoop]) -> None:
        """The first thing on the loop: grpc.aio is up before anything that is started here."""
        try:
            hold_aio()
        except BaseException as error:  # noqa: BLE001  no thread is left, most likely; raised where it was asked for
            made.set_exception(error)
            loop.stop()
        else:
            made.set_result(loop)

    def on_failure(self, hear: Callable[[BaseException], None]) -> None:
        """Has a function called, on the loop, when work there has failed for want of memory, threads or descriptors.

        It is unknown then which work was left out, so a session must not go on with this loop.
        """
        self._hearers.append(hear)

    def forget(self, hear: Callable[[BaseException], None]) -> None:
        """Undoes `on_failure`."""
        with contextlib.suppress(ValueError):
            self._hearers.remove(hear)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback has failed, or a task whose end nobody asked for."""
        error = context.get("exception")
        if isinstance(error, BaseException) and is_exhausted(error):
            self._tell(error)
        loop.default_exception_handler(context)

    def _tell(self, error: BaseException) -> None:
        for hear in list(self._hearers):
            hear(error)

    @property
    def is_current(self) -> bool:
        """True in code that runs on the loop: it must not block on it."""
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop; callable from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None, *, keep: bool = False) -> T:
        """Runs a coroutine on the loop and waits for its result.

        Args:
            work: the coroutine; it should bound its own time.
            timeout: seconds, or None for as long as the coroutine takes.
            keep: it goes on if the wait ends early; else it is cancelled.

        Raises:
            TimeoutError: it took longer.
            concurrent.futures.CancelledError: it was cancelled.
        """
        assert not self.is_current, "the loop cannot wait for itself"
        outcome: Outcome[T] = Outcome()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            try:
                tasks.append(self.loop.create_task(work))
                tasks[0].add_done_callback(end)
            except BaseException as error:  # noqa: BLE001  no memory is left; the waiting caller must hear of it
                outcome.set_exception(error)

        def end(task: asyncio.Task[T]) -> None:
            tasks.clear()  # freed here: asyncio has a callback for that, in which an interrupt would be lost
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


def loop_thread() -> LoopThread:
    """The loop thread of this process; a forked child gets a new one."""
    global _current
    with _lock:
        if _current is None or _current[0] != os.getpid():
            _current = (os.getpid(), LoopThread())
        return _current[1]
