"""Operations in issue order: `Work`, the handle of one, and `Lane`, which runs them.

All ranks must run their operations in the same order, so that their numbers agree. The lane gives each operation its
number when it is issued, and runs one at a time: in the caller's thread if no other is waiting, else in the group's one
thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from paceline._base.activity import MemberCounters
from paceline._base.waits import SLICE, Latch
from paceline.errors import ConcurrentUse, SessionClosed

T = TypeVar("T")
Abort: TypeAlias = Callable[[int, BaseException], None]
Begin: TypeAlias = Callable[[int], Callable[[], T]]
"""Returns the task of an operation, given its number."""


class Progress(NamedTuple):
    """The last operation of a group that began (0 for none), for heartbeats, and whether it runs.

    `since` is `time.monotonic()` when it began, or when it ended if it has.
    """

    operation: int
    since: float
    inside: bool


class Work(Generic[T]):
    """An operation in the background. Its arrays must not be changed or read before `wait` has returned.

    Attributes:
        operation: its number in the group.
    """

    def __init__(
        self, operation: int, task: Callable[[], T], abort: Abort, counters: MemberCounters | None = None
    ) -> None:
        self.operation = operation
        self._abort = abort
        self._counters = counters
        self._task: Callable[[], T] | None = task
        self._over = Latch()
        self._callbacks: list[Callable[[], None]] = []
        self._result: T
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        if not self.done():
            state = "not done"
        else:
            state = "done" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<Work operation {self.operation}, {state}>"

    def done(self) -> bool:
        """Returns True if the operation has succeeded or failed."""
        return self._over.is_set()

    def exception(self) -> BaseException | None:
        """Returns the operation's error; None if it has succeeded or still runs."""
        return self._error if self.done() else None

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls a function once the operation has succeeded or failed: in the group's thread, or here if it has.

        Args:
            callback: must return soon, because the next operation waits for it, and must not raise.
        """
        self._callbacks.append(callback)
        if self._over.is_set():
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            with suppress(IndexError):  # another thread has just taken the last callback: each is called once
                self._callbacks.pop()()

    def wait(self, timeout: float | None = None) -> T:
        """Waits until the operation is over, and returns its result. May be called any number of times.

        If the time runs out or the wait is interrupted, the operation is aborted, which voids the generation. In any
        case no thread uses the arrays after this has returned or raised (I7).

        Args:
            timeout: seconds; None for the operation's own timeout.

        Raises:
            OperationTimeout: the operation was not over in time.
            PacelineError: the generation has failed.
        """
        if not self._over.is_set():
            began = monotonic()
            try:
                if not self._over.wait(timeout):
                    self._abort(self.operation, TimeoutError(f"not done after {timeout} s"))
                    self._over.wait()
            except BaseException as error:
                self._abort(self.operation, error)
                self._wait_for_abort()
                raise
            finally:
                if self._counters is not None:
                    self._counters.add_wait(monotonic() - began)
        if self._error is not None:
            raise self._error
        return self._result

    def _wait_for_abort(self) -> None:
        """Waits until the aborted operation is over, even if a second interrupt comes."""
        while not self._over.is_set():
            with suppress(KeyboardInterrupt):
                self._over.wait()

    def _fail(self, error: BaseException) -> None:
        """Ends the operation with an error from outside, if it is not over."""
        if not self._over.is_set():
            self._error, self._task = error, None
            self._over.set()
            self._call_back()

    def _run(self) -> None:
        task, self._task = self._task, None  # so that the arrays are freed when it is over
        assert task is not None
        try:
            self._result = task()
        except BaseException as error:  # noqa: BLE001  `wait` raises it
            self._error = error
        finally:
            del task
            self._over.set()
            self._call_back()


class Lane:
    """Runs operations one at a time in issue order. Thread-safe.

    `abort` makes the running operation fail soon; it gets the number of an operation that its caller has given up, and
    the reason. An `exclusive` lane refuses operations of a second thread while the first one is alive and has not
    called `hand_over`.
    """

    def __init__(self, abort: Abort, *, exclusive: bool = False, counters: MemberCounters | None = None) -> None:
        self._abort = abort
        self._counters = MemberCounters() if counters is None else counters
        self._exclusive = exclusive
        self._lock = threading.RLock()  # entered in C: an interrupt cannot leave it locked, as it can a Condition
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Work[Any]] = deque()
        self._busy: threading.Thread | None = None  # the thread that runs an operation
        self._inside = False  # a caller's thread is inside its operation
        self._closed = False
        self._issued = 0
        self._owner: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._running: Work[Any] | None = None  # the operation on the lane's thread
        self._awaited = 0  # threads other than the lane's own that wait for a change
        self._progress = (0, monotonic(), False)

    @property
    def progress(self) -> Progress:
        """The operation that the lane is at."""
        return Progress(*self._progress)

    def run(self, begin: Begin[T], deadline: float) -> T:
        """Runs an operation after those issued before it, and returns its result.

        It waits for them until `deadline`, a `time.monotonic()` value. Raises ConcurrentUse if the lane belongs to
        another thread, and SessionClosed if it is closed.
        """
        numbered = done = mine = False
        work: Work[T] | None = None
        try:
            with self._lock:
                caller = self._admit()
                numbered = True
                operation, task = self._number(begin)
                mine = self._busy is None and not self._queue
                if mine:
                    self._busy = caller
                else:
                    work = self._enqueue(operation, task)
            if work is not None:
                return work.wait(max(0.0, deadline - monotonic()))
            self._progress = (operation, monotonic(), True)
            self._inside = True
            result = task()
            self._inside = False
            done = True
            return result
        except BaseException as error:
            if numbered and not done and work is None:  # the number may be used up, and no other code knows
                self._abort(self._issued, error)
            raise
        finally:
            if mine:
                self._end_turn(waited=True)

    def submit(self, begin: Begin[T]) -> Work[T]:
        """Queues an operation for the group's thread; raises ConcurrentUse and SessionClosed as `run` does."""
        numbered = False
        try:
            with self._lock:
                self._admit()
                numbered = True
                return self._enqueue(*self._number(begin))
        except BaseException as error:
            if numbered:
                self._abort(self._issued, error)
            raise

    def flush(self) -> None:
        """Waits until no operation runs or is queued. Operations that fail are over too; their `wait` raises."""
        me, began = threading.current_thread(), monotonic()
        with self._lock:
            self._awaited += 1
            try:
                while self._working(me) and not self._only_ends():
                    self._changed.wait(SLICE)
            finally:
                self._awaited -= 1
                self._counters.add_wait(monotonic() - began)

    def _only_ends(self) -> bool:
        """Returns True if the last operation is over, and its thread is about to end its turn."""
        return not self._queue and self._running is not None and self._running.done()

    def hand_over(self, *, to_all: bool = False) -> None:
        """Gives the lane to the next thread that issues an operation; with `to_all`, to all threads from now on."""
        with self._lock:
            self._owner = None
            self._exclusive = self._exclusive and not to_all

    def close(self, deadline: float) -> None:
        """Waits until the deadline for operations to end, aborts the rest, and ends the thread. Idempotent."""
        me = threading.current_thread()
        with self._lock:
            self._closed = True
            self._awaited += 1  # never taken back: no operation begins after this
            self._changed.notify_all()
            while (left := deadline - monotonic()) > 0 and self._working(me):
                self._changed.wait(left)
            working = self._working(me)
        if working:
            self._abort(self.progress.operation, SessionClosed("the group was closed before the operation was done"))
            with self._lock:
                while self._working(me):  # not for long: the abort wakes the operation
                    self._changed.wait()
        if self._thread is not None and me not in (self._thread, self._busy):
            self._thread.join()

    def _working(self, me: threading.Thread) -> bool:
        """Returns True while another thread runs an operation, or operations are queued."""
        return self._busy not in (None, me) or bool(self._queue)

    def _admit(self) -> threading.Thread:
        """Returns the calling thread, if it may issue an operation now; else raises."""
        if self._closed:
            raise SessionClosed("the group is closed")
        caller, owner = threading.current_thread(), self._owner
        if self._busy is caller:
            if self._inside:
                raise ConcurrentUse("a collective was called inside another one, perhaps by a signal handler")
            self._busy = None  # it was interrupted after its operation, before `_end_turn`
        if self._exclusive and owner is not caller:
            if owner is not None and owner.is_alive():
                raise ConcurrentUse(
                    f"thread {caller.name!r} called a collective of a group that belongs to thread {owner.name!r}, "
                    f"which still runs (operation {self._issued} was its last); give each thread a group of its own, "
                    'group.subgroup(range(group.size), name="..."), or call group.hand_over() in between',
                    operation=self._issued,
                )
            self._owner = caller
        return caller

    def _number(self, begin: Begin[T]) -> tuple[int, Callable[[], T]]:
        self._issued += 1
        self._counters.operations += 1
        return self._issued, begin(self._issued)

    def _enqueue(self, operation: int, task: Callable[[], T]) -> Work[T]:
        if self._thread is None:  # before the operation is queued: this may raise
            thread = threading.Thread(target=self._serve, name="paceline-group", daemon=True)
            thread.start()
            self._thread = thread
        work = Work(operation, task, self._abort, self._counters)
        self._queue.append(work)
        self._changed.notify_all()
        return work

    def _serve(self) -> None:
        """Runs in the lane's thread; if that fails, fails all queued operations, so that no caller waits for ever."""
        try:
            self._run_all()
        except BaseException as error:  # noqa: BLE001  most likely MemoryError; `Work.wait` raises it
            try:
                self._abort(self._progress[0], error)  # first: an operation that is issued now must fail too
            finally:
                with self._lock:
                    self._closed = True
                    self._busy = None
                    while self._queue:
                        self._queue.popleft()._fail(error)
                    if self._running is not None:
                        self._running._fail(error)
                    self._changed.notify_all()

    def _run_all(self) -> None:
        me = threading.current_thread()
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._busy is None and (self._queue or self._closed))
                if not self._queue:
                    return
                self._busy = me
                self._running = work = self._queue[0]
                self._queue.popleft()
            self._progress = (work.operation, monotonic(), True)
            work._run()
            del work  # its result belongs to the caller, not to an idle thread
            self._end_turn()
            self._running = None

    def _end_turn(self, *, waited: bool = False) -> None:
        """Lets the next operation begin; `waited` if this one ran in its caller's thread."""
        operation, began, inside = self._progress
        now = monotonic()
        self._progress = (operation, now, False)
        if waited and inside:
            self._counters.add_wait(now - began)
        with self._lock:
            self._busy = None
            if self._thread is not None or self._awaited:
                self._changed.notify_all()
