"""Threads of simulated processes: each a greenlet, so that blocking code of the real client runs under simulated time.

Whatever blocks (a latch, a queue, a sleep, the end of a thread) gives the turn back to the clock's loop, which resumes
the thread when what it waits for has come or its time is over. Only one runs at a time and only there it changes, so a
seed repeats exactly. Greenlets and not real threads: a switch costs less than a microsecond, and a schedule has
thousands.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import greenlet

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.world import World

__all__ = [
    "Over",
    "SimulatedCondition",
    "SimulatedEvent",
    "SimulatedQueue",
    "SimulatedTime",
    "Thread",
    "Waiters",
    "current",
    "new_thread",
]


class Over(BaseException):
    """The schedule has ended: what still runs is taken down."""


class Thread(greenlet.greenlet):
    """One thread of a process; begins when it is started.

    Args:
        process: whose.
        target: what it does.
    """

    def __init__(self, process: Process, target: Callable[..., object], args: tuple[Any, ...] = ()) -> None:
        super().__init__(self._main)
        self.process = process
        self.name = process.name
        self._target = target
        self._args = args
        self._turn = 0
        self._parked = self._woken = False
        self._ended = Waiters()
        self.parent = process.world.hub

    def start(self) -> None:
        """Begins, when the loop gets to it."""
        self.process.threads.append(self)
        self.process.later(0.0, self.switch)

    def is_alive(self) -> bool:
        """True while it runs."""
        return not self.dead

    def join(self) -> None:
        """Waits for its end."""
        while not self.dead:
            self._ended.wait(None)

    def park(self, timeout: float | None) -> bool:
        """Gives the turn back; True if it was woken, False if so many seconds are over."""
        self._turn += 1
        self._parked, self._woken = True, False
        if timeout is not None:
            self.process.later(timeout, self._resume, self._turn)
        self.parent.switch()
        if self.process.world.over:
            raise Over
        return self._woken

    def wake(self) -> None:
        """What it waits for has come."""
        if self._parked and not self._woken:
            self._woken = True
            self.process.later(0.0, self._resume, self._turn)

    def take_down(self) -> None:
        """Ends it where it is; the schedule is over."""
        if self and not self.dead:  # it has begun
            self.throw(Over)

    def _resume(self, turn: int) -> None:
        if self._parked and turn == self._turn:
            self._parked = False
            self.switch()

    def _main(self) -> None:
        with contextlib.suppress(Over):
            self._target(*self._args)
        self._ended.wake_after()


def current() -> Thread:
    """The thread that runs."""
    thread = greenlet.getcurrent()
    assert isinstance(thread, Thread), "the loop of a simulated process must not block"
    return thread


class Waiters:
    """Threads that wait for one thing."""

    def __init__(self) -> None:
        self._threads: list[Thread] = []

    def wait(self, timeout: float | None) -> bool:
        """Waits for `wake`; False if so many seconds are over first."""
        thread = current()
        if timeout is not None and timeout <= 0:
            return False
        self._threads.append(thread)
        try:
            return thread.park(timeout)
        finally:
            self._threads.remove(thread)

    def wake(self) -> None:
        """It has come."""
        for thread in self._threads:
            thread.wake()

    wake_after = wake


class SimulatedCondition:
    """`threading.Condition`. Its lock keeps nobody out: a thread gives the turn back nowhere but in `wait`."""

    def __init__(self, lock: Any) -> None:
        self._waiters = Waiters()

    def wait(self, timeout: float | None = None) -> bool:
        return self._waiters.wait(timeout)

    def wait_for(self, predicate: Callable[[], object]) -> None:
        while not predicate():
            self._waiters.wait(None)

    def notify_all(self) -> None:
        self._waiters.wake()


class SimulatedEvent:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters = Waiters()

    def set(self) -> None:
        self._is_set = True
        self._waiters.wake()

    def wait(self, timeout: float) -> bool:
        return self._is_set or self._waiters.wait(timeout)


def new_thread(*, target: Callable[..., object], name: str = "", daemon: bool = False) -> Thread:
    """`threading.Thread`, of the process whose thread makes it."""
    return current().process.thread(target)


class SimulatedQueue:
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiters = Waiters()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._waiters.wake()

    def get(self, timeout: float) -> Any:
        if not self._items:
            self._waiters.wait(timeout)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class SimulatedTime:
    """`time`, as far as the client uses it."""

    def __init__(self, world: World) -> None:
        self._clock = world.clock

    def monotonic(self) -> float:
        return self._clock.now

    def sleep(self, seconds: float) -> None:
        current().park(seconds)
