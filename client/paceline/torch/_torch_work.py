"""What torch.distributed hands out for an operation that may not be over: `Work`, its future, and errors.

Scripts of torch.distributed catch RuntimeError, Paceline's users its types. So what a process group raises is both: the
Paceline error, and `torch.distributed.DistBackendError` (a RuntimeError).

Errors are the reason for most of this (facts measured with torch 2.13): `Future.set_exception` looks like success to
C++, so a future's value comes from a callback that raises; and futures run their callbacks inside `set_result`, which
may issue and await another operation (PowerSGD does), so they are completed on threads of their own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline import work
from paceline.errors import OperationTimeout, PacelineError
from paceline.torch.compiling import never_traced

__all__ = ["Futures", "Operation", "Promise", "for_torch", "seconds_of", "told_to_torch"]


@functools.cache
def _both(kind: Any) -> Any:
    return type(kind.__name__, (kind, dist.DistBackendError), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def for_torch(error: BaseException) -> BaseException:
    """The same error, a `DistBackendError` too if it is Paceline's."""
    if not isinstance(error, PacelineError) or isinstance(error, dist.DistBackendError):
        return error
    kind: Any = type(error)
    both = _both(kind)
    made: PacelineError = both.__new__(both)
    made.__dict__.update(error.__dict__)
    text = str(error)
    made.args = (f"{text} (the timeout of this call)" if isinstance(error, OperationTimeout) else text,)
    return made.with_traceback(error.__traceback__)


@contextmanager
def told_to_torch() -> Iterator[None]:
    """Raises what the block raises as `for_torch` has it."""
    try:
        yield
    except PacelineError as error:
        raise for_torch(error) from error.__cause__


_MOST_THREADS = 32
"""Callbacks that may be waiting for further operations at the same time."""


def seconds_of(timeout: timedelta | float | None) -> float | None:
    """A timeout of torch's in seconds; None where it stands for "as long as the group says"."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout or -1.0
    return seconds if seconds > 0 else None


class Promise:
    """A future for something that may not be over.

    C++ asks for the future of a work whose `wait` has returned, and at once for its value. So `wait` keeps the promise
    as well, if nobody has done so yet.

    Args:
        value: the value of the future, or its error; it must not block.
    """

    def __init__(self, value: Callable[[], Any]) -> None:
        self._lock = threading.Lock()
        self._base: Any = torch.futures.Future()
        self.future = self._base.then(lambda _: value())

    def keep(self) -> None:
        """Completes the future and runs its callbacks, unless another thread does. Idempotent."""
        with self._lock:
            base, self._base = self._base, None
        if base is not None:
            base.set_result(None)

    def settle(self) -> None:
        """Returns when the future has its value, which another thread may be about to give it."""
        self.keep()
        self.future.wait()


class Futures:
    """Completes futures, on threads that are made when there is a first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def complete(self, promise: Promise) -> None:
        """Runs the callbacks of a future; in this thread if the group is closed, when nothing is left to wait for."""
        with self._lock:
            if not self._closed:
                self._pool = self._pool or ThreadPoolExecutor(_MOST_THREADS, "paceline-futures")
                self._pool.submit(promise.keep)
                return
        promise.keep()

    def close(self) -> None:
        """Completes what is left, then ends the threads. Idempotent."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


@never_traced
class Operation(dist.Work):  # type: ignore[misc]  # torch has no types here
    """An operation, perhaps over.

    Args:
        handles: Paceline's, in the order of issue; none if it is over.
        results: the tensors that it fills, `result()` and the future's value.
        finishes: what is left to do when all handles are done: copies to where results belong.
        futures: completes the future.
    """

    def __init__(
        self,
        handles: Sequence[work.Work[Any]],
        results: Sequence[Any],
        finishes: Sequence[Callable[[], None]],
        futures: Futures,
    ) -> None:
        super().__init__()
        self._handles = handles
        self._results = list(results)
        self._finishes: Sequence[Callable[[], None]] = finishes
        self._futures = futures
        self._lock = threading.Lock()
        self._promise: Promise | None = None
        if not handles:
            self._finish()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns True when results may be read.

        Raises:
            PacelineError: it has failed; which member is to blame, and for what, is in the text.
        """
        left = seconds_of(timeout)
        with told_to_torch():
            for handle in self._handles:
                handle.wait(left)
        self._finish()
        if self._promise is not None:
            self._promise.settle()
        return True

    def synchronize(self) -> None:
        """As `wait`: there are no streams on a CPU."""
        self.wait()

    def is_completed(self) -> bool:
        """True once it is over, well or not."""
        return all(handle.done() for handle in self._handles)

    def is_success(self) -> bool:
        """True if it is over, and well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Why it has failed; None if it has not, or not yet."""
        return next((for_torch(error) for handle in self._handles if (error := handle.exception())), None)

    def result(self) -> list[Any]:
        """The tensors that it has filled.

        Raises:
            PacelineError: as `wait`.
        """
        self.wait()
        return self._results

    def get_future(self) -> Any:
        """A future whose value is `result()`, or its error."""
        with self._lock:
            promise, first = self._promise, self._promise is None
            if promise is None:
                promise = self._promise = Promise(self._value)
        if self.is_completed():
            promise.settle()
        elif first:
            self._handles[-1].on_done(lambda: self._futures.complete(promise))  # a lane keeps the order: it is the last
        return promise.future

    def _value(self) -> list[Any]:
        error = self.exception()
        if error is not None:
            raise error
        self._finish()
        return self._results

    def _finish(self) -> None:
        with self._lock:
            finishes, self._finishes = self._finishes, ()
            for finish in finishes:
                finish()
