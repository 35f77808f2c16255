"""Operations in issue order: the handle of one (`Work`), and the lane that runs them (`Lane`).

All ranks must carry out their operations in one order, so that numbers agree. The lane gives each its number when it is
issued, and runs one at a time: in the caller's thread if nothing is before it, else on the group's one thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from paceline._wait import SLICE, Latch
from paceline.errors import ConcurrentUse, SessionClosed

__all__ = ["Lane", "Progress", "Work"]

T = TypeVar("T")
Abort: TypeAlias = Callable[[int, BaseException], None]
Begin: TypeAlias = Callable[[int], Callable[[], T]]
"""From an operation's number to its task."""


class Progress(NamedTuple):
    """Where a group is, for heartbeats.

    Attributes:
        operation: number of the last operation that began, 0 for none.
        since: `time.monotonic()` value of when it began, or ended.
        inside: True between its begin and its end.
    """

    operation: int
    since: float
    inside: bool


class Work(Generic[T]):
    """An operation that runs behind the caller. Its arrays must not be changed or read before `wait` has returned.

    Attributes:
        operation: its number in the group.
    """

    def __init__(self, operation: int, task: Callable[[], T], abort: Abort) -> None:
        self.operation = operation
        self._abort = abort
        self._task: Callable[[], T] | None = task
        self._over = Latch()
        self._hearers: list[Callable[[], None]] = []
        self._result: T
        self._error: BaseException | None = None

    def done(self) -> bool:
        """True once it has ended, well or not."""
        return self._over.is_set()

    def exception(self) -> BaseException | None:
        """Why it has failed; None if it has not, or has not ended."""
        return self._error if self.done() else None

    def on_done(self, hear: Callable[[], None]) -> None:
        """Has a function called once when it has ended, well or not: in the group's thread, or in this one if it has.

        Args:
            hear: must return soon, for what is in line waits, and must not raise.
        """
        self._hearers.append(hear)
        if self._over.is_set():
            self._tell()

    def _tell(self) -> None:
        while self._hearers:
            with suppress(IndexError):  # taken by the other thread meanwhile: each is called once
                self._hearers.pop()()

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the end and returns the result; any number of times.

        If the time runs out, or the wait is interrupted, the operation is aborted, which voids the generation. In
        every case no thread touches the arrays any more when this returns (I7).

        Args:
            timeout: seconds; None to wait as long as the operation's own timeout lets it run.

        Raises:
            OperationTimeout: the time ran out.
            PacelineError: the generation has failed.
        """
        if not self._over.is_set():
            try:
                if not self._over.wait(timeout):
                    self._abort(self.operation, TimeoutError(f"not done after {timeout} s"))
                    self._over.wait()
            except BaseException as error:
                self._abort(self.operation, error)
                self._outlast()
                raise
        if self._error is not None:
            raise self._error
        return self._result

    def _outlast(self) -> None:
        """Waits for the end of what has been aborted, even if a second interrupt comes."""
        while not self._over.is_set():
            with suppress(KeyboardInterrupt):
                self._over.wait()

    def _fail(self, error: BaseException) -> None:
        """It ends with an error that is not its own; without effect if it has ended."""
        if not self._over.is_set():
            self._error, self._task = error, None
            self._over.set()
            self._tell()

    def _run(self) -> None:
        task, self._task = self._task, None  # let go of the arrays when it is over
        assert task is not None
        try:
            self._result = task()
        except BaseException as error:  # noqa: BLE001  it is raised by `wait`
            self._error = error
        finally:
            del task
            self._over.set()
            self._tell()


class Lane:
    """Runs operations one at a time in issue order. Thread-safe.

    Args:
        abort: makes the running operation end, soon and with an error; given the operation that nobody waits for any
            longer, and why.
        exclusive: refuse operations of a second thread while the first lives and has not handed over.
    """

    def __init__(self, abort: Abort, *, exclusive: bool = False) -> None:
        self._abort = abort
        self._exclusive = exclusive
        self._lock = threading.RLock()  # entered in C: an interrupt cannot leave it taken, as it can a Condition
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Work[Any]] = deque()
        self._busy: threading.Thread | None = None  # whose turn it is
        self._inside = False  # a caller's thread is inside an operation
        self._closed = False
        self._issued = 0
        self._owner: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._running: Work[Any] | None = None  # on that thread
        self._awaited = 0  # threads that wait for a change, beside the lane's own
        self._progress = (0, monotonic(), False)

    @property
    def progress(self) -> Progress:
        """Where the lane is."""
        return Progress(*self._progress)

    def run(self, begin: Begin[T], deadline: float) -> T:
        """Runs an operation in its turn and returns its result; `begin` makes its task of its number.

        Raises:
            ConcurrentUse: the lane belongs to another thread.
            SessionClosed: the lane is closed.
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
            if numbered and not done and work is None:  # perhaps the number is used up, and nobody else knows
                self._abort(self._issued, error)
            raise
        finally:
            if mine:
                self._frees()

    def submit(self, begin: Begin[T]) -> Work[T]:
        """Puts an operation in line for the group's thread.

        Raises:
            ConcurrentUse, SessionClosed: as `run`.
        """
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
        """Waits until nothing is under way or in line. What is aborted ends too, with its error at whoever waits."""
        me = threading.current_thread()
        with self._lock:
            self._awaited += 1
            try:
                while self._working(me) and not self._only_ends():
                    self._changed.wait(SLICE)
            finally:
                self._awaited -= 1

    def _only_ends(self) -> bool:
        """True if the last operation is over, and the thread that ran it has yet to say that its turn is."""
        return not self._queue and self._running is not None and self._running.done()

    def hand_over(self, *, to_all: bool = False) -> None:
        """The next thread that issues an operation owns the lane; or none does, from now on."""
        with self._lock:
            self._owner = None
            self._exclusive = self._exclusive and not to_all

    def close(self, deadline: float) -> None:
        """Runs what is under way until the deadline, aborts the rest, and ends the thread. Idempotent."""
        me = threading.current_thread()
        with self._lock:
            self._closed = True
            self._awaited += 1  # for good: nothing begins any more
            self._changed.notify_all()
            while (left := deadline - monotonic()) > 0 and self._working(me):
                self._changed.wait(left)
            working = self._working(me)
        if working:
            self._abort(self.progress.operation, SessionClosed("the group was closed before the operation was done"))
            with self._lock:
                while self._working(me):  # not for long: the failure wakes it
                    self._changed.wait()
        if self._thread is not None and me not in (self._thread, self._busy):
            self._thread.join()

    def _working(self, me: threading.Thread) -> bool:
        """True while another thread has an operation under way, or some are in line for the group's."""
        return self._busy not in (None, me) or bool(self._queue)

    def _admit(self) -> threading.Thread:
        """The caller, if it may issue an operation now."""
        if self._closed:
            raise SessionClosed("the group is closed")
        caller, owner = threading.current_thread(), self._owner
        if self._busy is caller:
            if self._inside:
                raise ConcurrentUse("a collective was called inside another one, perhaps by a signal handler")
            self._busy = None  # an interrupt came between the end of its operation and the end of its turn
        if self._exclusive and owner is not caller:
            if owner is not None and owner.is_alive():
                raise ConcurrentUse(
                    f"thread {caller.name!r} called a collective of a group that is thread {owner.name!r}'s, which "
                    f"lives (operation {self._issued} was its last); give each thread a group of its own, "
                    'group.subgroup(range(group.size), name="..."), or call group.hand_over() in between',
                    operation=self._issued,
                )
            self._owner = caller
        return caller

    def _number(self, begin: Begin[T]) -> tuple[int, Callable[[], T]]:
        self._issued += 1
        return self._issued, begin(self._issued)

    def _enqueue(self, operation: int, task: Callable[[], T]) -> Work[T]:
        if self._thread is None:  # before anything is in line: if no thread can be had, nobody waits for what is there
            thread = threading.Thread(target=self._serve, name="paceline-group", daemon=True)
            thread.start()
            self._thread = thread
        work = Work(operation, task, self._abort)
        self._queue.append(work)
        self._changed.notify_all()
        return work

    def _serve(self) -> None:
        """The lane's thread. It does not end while somebody waits for what is in line."""
        try:
            self._run_all()
        except BaseException as error:  # noqa: BLE001  no memory is left, most likely; `Work.wait` raises it
            try:
                self._abort(self._progress[0], error)  # first: who issues an operation now shall hear of this, too
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
            self._frees()
            self._running = None

    def _frees(self) -> None:
        """The next in line may begin."""
        self._progress = (self._progress[0], monotonic(), False)
        with self._lock:
            self._busy = None
            if self._thread is not None or self._awaited:
                self._changed.notify_all()
