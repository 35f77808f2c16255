"""The one event loop thread of the process: everything of grpc.aio lives on it, behind synchronous faces.

One loop for all sessions (and for a coordinator that the process embeds), because aio objects belong to the loop that
made them and grpc polls for one loop best. The thread is a daemon and starts with its first use.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

from paceline._grpc import hold_aio
from paceline._wait import Outcome

__all__ = ["LoopThread", "loop_thread"]

T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs an asyncio loop for as long as the process lives."""

    def __init__(self) -> None:
        # Made in its own thread: Ctrl-C reaches the main thread only, and a loop half made complains when it is freed.
        made: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, args=(made,), name="paceline-loop", daemon=True)
        self._thread.start()
        self.loop = made.result()

    def _run(self, made: Future[asyncio.AbstractEventLoop]) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.call_soon(hold_aio)  # before anything that is started here
        made.set_result(loop)
        loop.run_forever()

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
            tasks.append(self.loop.create_task(work))
            tasks[0].add_done_callback(end)

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
