"""The asyncio loop of one simulated process, and its face for the training thread.

Coroutines of the real code (the control stream, the dispatcher, the session's handlers) run on it as real tasks. What
is to happen goes to the simulated clock; nothing sleeps. A process that is frozen takes in later what came meanwhile,
one that is dead takes in nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from simulation.clock import Clock

from paceline._base.waits import LoopThread

__all__ = ["Loop", "SimulatedLoopThread"]


class _Handle:
    """Something that the loop will call."""

    __slots__ = ("_args", "_call", "_cancelled", "_when")

    def __init__(self, when: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._when = when
        self._call = call
        self._args = args
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when

    def run(self) -> None:
        if not self._cancelled:
            self._call(*self._args)


def _look_at(task: asyncio.Task[Any]) -> None:
    """What no caller expects is not kept from the schedule."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, AssertionError | LookupError | TypeError | AttributeError):
        raise error


class Loop:
    """As much of `asyncio.AbstractEventLoop` as tasks, futures, queues and timeouts use.

    Args:
        clock: the simulated time.
        hear: takes in what happens to the process: calls it now, or later, or never.
    """

    def __init__(self, clock: Clock, hear: Callable[..., None]) -> None:
        self._clock = clock
        self._hear = hear
        self._tasks: list[asyncio.Task[Any]] = []
        self._over = False
        self._ready: deque[_Handle] = deque()

    def time(self) -> float:
        return self._clock.now

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def create_task(self, work: Coroutine[Any, Any, Any], *, name: object = None, context: object = None) -> Any:
        task = asyncio.Task(work, loop=self, name="task")  # type: ignore[arg-type]
        self._tasks.append(task)
        task.add_done_callback(_look_at)
        return task

    def call_soon(self, call: Callable[..., object], *args: Any, context: object = None) -> _Handle:
        return self.call_at(self._clock.now, call, *args)

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, call: Callable[..., object], *args: Any, context: object = None) -> _Handle:
        return self.call_at(self._clock.now + delay, call, *args)

    def call_at(self, when: float, call: Callable[..., object], *args: Any, context: object = None) -> _Handle:
        handle = _Handle(when, call, args)
        if self._over:
            if when <= self._clock.now:
                self._ready.append(handle)
            return handle
        self._clock.at(when, self._hear, self._run, handle)
        return handle

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Somebody forgot to look at an error: a schedule in which that happens is broken."""
        error = context.get("exception")
        if error is not None and not self._over:
            raise AssertionError(context["message"]) from error

    def close(self) -> None:
        """Ends what has not ended, at once; to be called when the schedule is over."""
        self._over = True
        for task in self._tasks:
            if not task.done():
                task.cancel()
        while self._ready:
            self._run(self._ready.popleft())
        for task in self._tasks:
            if not task.done():  # it had yet to begin
                task.get_coro().close()  # type: ignore[union-attr]

    def _run(self, handle: _Handle) -> None:
        asyncio._set_running_loop(self)  # type: ignore[arg-type]
        try:
            handle.run()
        finally:
            asyncio._set_running_loop(None)


class SimulatedLoopThread(LoopThread):
    """The real way from the training thread to the loop, on a simulated one."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop  # type: ignore[assignment]

    def on_failure(self, tell: Callable[[BaseException], None]) -> None:
        """No loop fails here."""

    def forget(self, tell: Callable[[BaseException], None]) -> None:
        """See `on_failure`."""

    @property
    def is_current(self) -> bool:
        return False
