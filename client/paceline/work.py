"""Operations in issue order: the handle of one (`Work`), and the lane that runs them (`Lane`).

All ranks must carry out their operations in one order, so that numbers agree. The lane gives each its number when it is
issued, and runs one at a time: in the caller's thread if nothing is before it, else on the group's one thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

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
        self._over = threading.Event()
        self._result: T
        self._error: BaseException | None = None

    def done(self) -> bool:
        """True once it has ended, well or not."""
        return self._over.is_set()

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
                self._over.wait()
                raise
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self, before_news: Callable[[], None]) -> None:
        task, self._task = self._task, None  # let go of the arrays when it is over
        assert task is not None
        try:
            self._result = task()
        except BaseException as error:  # noqa: BLE001  it is raised by `wait`
            self._error = error
        finally:
            del task
            before_news()
            self._over.set()


class Lane:
    """Runs operations one at a time in issue order. Thread-safe.

    Args:
        abort: makes the running operation end, soon and with an error; given the operation that nobody waits for any
            longer, and why.
        exclusive: refuse an operation while another thread's is not over.
    """

    def __init__(self, abort: Abort, *, exclusive: bool = False) -> None:
        self._abort = abort
        self._exclusive = exclusive
        self._changed = threading.Condition()
        self._queue: deque[Work[Any]] = deque()
        self._busy = False
        self._closed = False
        self._issued = 0
        self._open = 0  # operations that are not over, all of them issued by
        self._issuer: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self.progress = Progress(0, monotonic(), False)

    def run(self, begin: Begin[T], deadline: float) -> T:
        """Runs an operation in its turn and returns its result; `begin` makes its task of its number.

        Raises:
            ConcurrentUse: another thread's operation is not over.
            SessionClosed: the lane is closed.
        """
        with self._changed:
            operation, task = self._take_number(begin)
            first = not self._busy and not self._queue
            self._busy = self._busy or first
            work = None if first else self._enqueue(operation, task)
        if work is not None:
            return work.wait(max(0.0, deadline - monotonic()))
        try:
            self.progress = Progress(operation, monotonic(), True)
            return task()
        finally:
            self.progress = Progress(operation, monotonic(), False)
            with self._changed:
                self._closes()
                self._frees()

    def submit(self, begin: Begin[T]) -> Work[T]:
        """Puts an operation in line for the group's thread.

        Raises:
            ConcurrentUse, SessionClosed: as `run`.
        """
        with self._changed:
            return self._enqueue(*self._take_number(begin))

    def close(self, deadline: float) -> None:
        """Runs what is in line until the deadline, aborts the rest, and ends the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(max(0.0, deadline - monotonic()))
        if self._thread.is_alive():
            self._abort(self.progress.operation, SessionClosed("the group was closed before the operation was done"))
            self._thread.join()

    def _take_number(self, begin: Begin[T]) -> tuple[int, Callable[[], T]]:
        if self._closed:
            raise SessionClosed("the group is closed")
        caller = threading.current_thread()
        if self._exclusive and self._open and self._issuer is not caller:
            text = (
                f"thread {caller.name!r} called a collective while operation {self._issued} of the same group, of "
                f"thread {self._issuer.name if self._issuer else ''!r}, was not over; give each thread a group of its "
                f'own: group.subgroup(range(group.size), name="...")'
            )
            raise ConcurrentUse(text)
        self._issuer = caller
        self._open += 1
        self._issued += 1
        return self._issued, begin(self._issued)

    def _enqueue(self, operation: int, task: Callable[[], T]) -> Work[T]:
        work = Work(operation, task, self._abort)
        self._queue.append(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="paceline-group", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        return work

    def _closes(self) -> None:
        """An operation is over; nobody has been told yet, so that whoever is told may issue the next."""
        self._open -= 1
        if not self._open:
            self._issuer = None

    def _frees(self) -> None:
        """The next in line may begin."""
        self._busy = False
        if self._queue or self._closed:
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._busy and (self._queue or self._closed))
                if not self._queue:
                    return
                work = self._queue.popleft()
                self._busy = True
            self.progress = Progress(work.operation, monotonic(), True)
            work._run(self._before_news)
            operation = work.operation
            del work  # its result belongs to the caller, not to an idle thread
            self.progress = Progress(operation, monotonic(), False)
            with self._changed:
                self._frees()

    def _before_news(self) -> None:
        with self._changed:
            self._closes()
