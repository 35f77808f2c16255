"""`Operation`, the `torch.distributed.Work` of a collective; its future; and the errors that both raise.

An error is raised as both Paceline's type and `torch.distributed.DistBackendError` (a RuntimeError): scripts written
for torch.distributed catch RuntimeError, users of Paceline its own types.

Two facts, measured with torch 2.13, explain most of the code about futures. First, C++ treats a future on which
`set_exception` was called as a success, so a future's value comes from a callback, which raises. Second, a future runs
its callbacks inside `set_result`, where a callback may start and await another operation (PowerSGD does), so separate
threads complete futures.
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

from paceline._base.work import Work
from paceline.errors import OperationTimeout, PacelineError
from paceline.torch._compiling import never_traced

_MAX_THREADS = 32
"""Number of callbacks that may wait for further operations at the same time."""


def seconds_of(timeout: timedelta | float | None) -> float | None:
    """Converts a timeout from torch to seconds; None if it means "the group's timeout"."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout or -1.0
    return seconds if seconds > 0 else None


# Errors ---------------------------------------------------------------------------------------------------------------


@functools.cache
def _torch_error_type(kind: Any) -> Any:
    return type(kind.__name__, (kind, dist.DistBackendError), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def as_torch_error(error: BaseException) -> BaseException:
    """Returns the error; converts a Paceline error to one that is a `DistBackendError` too."""
    if not isinstance(error, PacelineError) or isinstance(error, dist.DistBackendError):
        return error
    own: Any = type(error)
    kind = _torch_error_type(own)
    converted: PacelineError = kind.__new__(kind)
    converted.__dict__.update(error.__dict__)
    text = str(error)
    converted.args = (f"{text} (the timeout of this call)" if isinstance(error, OperationTimeout) else text,)
    return converted.with_traceback(error.__traceback__)


@contextmanager
def raising_torch_errors() -> Iterator[None]:
    """Converts errors that the block raises with `as_torch_error`."""
    try:
        yield
    except PacelineError as error:
        raise as_torch_error(error) from error.__cause__


# Futures --------------------------------------------------------------------------------------------------------------


class Promise:
    """A torch future for the result of an operation that may still run.

    C++ asks a work for its future after `wait` has returned, and immediately for the future's value. So `wait` too
    completes the promise, unless another thread has done so. `value` returns the future's value, or raises its error;
    it must not block.
    """

    def __init__(self, value: Callable[[], Any]) -> None:
        self._lock = threading.Lock()
        self._base: Any = torch.futures.Future()
        self.future = self._base.then(lambda _: value())

    def complete(self) -> None:
        """Completes the future and runs its callbacks, unless another thread does. Idempotent."""
        with self._lock:
            base, self._base = self._base, None
        if base is not None:
            base.set_result(None)

    def wait_until_complete(self) -> None:
        """Completes the future; returns when it has its value, even if another thread is setting that now."""
        self.complete()
        self.future.wait()


class FutureThreads:
    """Threads that complete futures; the first future starts them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def complete(self, promise: Promise) -> None:
        """Completes a future in one of the threads; in the calling thread after `close`, as no operation runs then."""
        with self._lock:
            if not self._closed:
                self._pool = self._pool or ThreadPoolExecutor(_MAX_THREADS, "paceline-futures")
                self._pool.submit(promise.complete)
                return
        promise.complete()

    def close(self) -> None:
        """Waits for the futures that are being completed, then ends the threads. Idempotent."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


# Operations -----------------------------------------------------------------------------------------------------------


@never_traced
class Operation(dist.Work):  # type: ignore[misc]  # torch has no types here
    """A collective that is running or has ended.

    Args:
        handles: Paceline's handles, in the order of issue; empty if the operation has ended.
        results: the tensors that it fills: the value of `result()` and of the future.
        finishes: functions called once when all handles are done, for instance to copy results to their tensors.
        threads: the threads that complete the future.
    """

    def __init__(
        self,
        handles: Sequence[Work[Any]],
        results: Sequence[Any],
        finishes: Sequence[Callable[[], None]],
        threads: FutureThreads,
    ) -> None:
        super().__init__()
        self._handles = handles
        self._results = list(results)
        self._finishes: Sequence[Callable[[], None]] = finishes
        self._threads = threads
        self._lock = threading.Lock()
        self._promise: Promise | None = None
        if not handles:
            self._finish()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns True when the results may be read. An error names the member that caused it, and says why."""
        seconds = seconds_of(timeout)
        with raising_torch_errors():
            for handle in self._handles:
                handle.wait(seconds)
        self._finish()
        if self._promise is not None:
            self._promise.wait_until_complete()
        return True

    def synchronize(self) -> None:
        """Same as `wait`: a CPU has no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns True if the operation has succeeded or failed."""
        return all(handle.done() for handle in self._handles)

    def is_success(self) -> bool:
        """Returns True if the operation has succeeded."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Returns the operation's error; None if it has not failed so far."""
        return next((as_torch_error(error) for handle in self._handles if (error := handle.exception())), None)

    def result(self) -> list[Any]:
        """Waits, and returns the tensors that the operation fills."""
        self.wait()
        return self._results

    def get_future(self) -> Any:
        """Returns a future whose value is `result()`, or its error."""
        with self._lock:
            promise, first = self._promise, self._promise is None
            if promise is None:
                promise = self._promise = Promise(self._value)
        if self.is_completed():
            promise.wait_until_complete()
        elif first:
            # Operations of a group end in the order of issue, so the last handle is done last.
            self._handles[-1].on_done(lambda: self._threads.complete(promise))
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
