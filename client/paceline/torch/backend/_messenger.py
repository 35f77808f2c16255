"""Messages of a process group: sends that do not block, and receives that run in the thread that waits for them.

torch does not tell whether the caller will wait for a message at once. So the caller's thread sends a small message if
there is room for it, and one thread for each receiver sends the others in order. A receive runs in the thread that
waits for it. If that thread starts another operation first, or waits with a timeout, the receive runs in a thread of
its own, in order with others of its source and tag.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline._base.waits import Latch
from paceline._group import Group
from paceline.errors import OperationTimeout, PacelineError, SessionClosed
from paceline.torch._compiling import never_traced
from paceline.torch._tensors import elements_of, result_buffer
from paceline.torch.backend._operation import Promise, as_torch_error, seconds_of

_SMALL = 8 << 10
"""The largest message, in bytes, that the caller's thread sends: one frame, which is sent whole or not at all."""


@never_traced
class MessageWork(dist.Work):  # type: ignore[misc]  # torch has no types here
    """A message that is sent or received by `act`, which returns the other side's rank.

    The results have the tensor that is sent or filled.
    """

    def __init__(self, act: Callable[[], int], queue: _MessageQueue, results: list[Any]) -> None:
        super().__init__()
        self._act: Callable[[], int] | None = act
        self._queue = queue
        self._results = results
        self._over = Latch()
        self._error: BaseException | None = None
        self._source = -1
        self._promises: list[Promise] = []

    def run(self) -> None:
        """Sends or receives the message; the queue calls this once, in order."""
        act, self._act = self._act, None
        assert act is not None, "a message is sent or received once"
        try:
            self._source = act()
        except BaseException as error:  # noqa: BLE001  `wait` re-raises it
            self._error = error
        finally:
            self._over.set()
        for promise in self._promises:
            promise.complete()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns True when the message was received, or when the tensor that is sent may be changed.

        The transfer continues after the timeout; 0 for the group's timeout.
        """
        within = seconds_of(timeout)
        if within is None:
            self._queue.run_up_to(self)
        else:
            self._queue.start()  # another thread runs it, so that this one returns in time
        if not self._over.wait(within):
            late = OperationTimeout(
                f"a message {self._queue.route} was not transferred within {timeout.total_seconds():g} s"
            )
            raise as_torch_error(late)
        self._value()
        for promise in self._promises:
            promise.wait_until_complete()
        return True

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns True if the message was sent, received, or failed; starts it if no thread waits for it yet."""
        self._queue.start()
        return self._over.is_set()

    def is_success(self) -> bool:
        """Returns True if the message was sent or received."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Returns the error; None if the message has not failed so far."""
        return as_torch_error(self._error) if self.is_completed() and self._error is not None else None

    def result(self) -> list[Any]:
        """Waits, and returns the tensor in a list."""
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Waits, and returns the sender's rank in the group."""
        self.wait()
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Returns a future whose value is `result()`, or its error."""
        promise = Promise(self._value)
        with self._queue.lock:
            self._promises.append(promise)
        if self._over.is_set():  # otherwise `run` completes the promise
            promise.wait_until_complete()
        self._queue.start()
        return promise.future

    def _value(self) -> list[Any]:
        if self._error is not None:
            raise as_torch_error(self._error)
        return self._results


class _MessageQueue:
    """A queue of messages that must be sent, or received, in order. `route` is for errors, e.g. "to rank 2"."""

    def __init__(self, route: str) -> None:
        self.route = route
        self.lock = threading.Lock()
        self._waiting: deque[MessageWork] = deque()
        self._runner: threading.Thread | None = None
        self._free = threading.Condition(self.lock)

    def put(self, message: MessageWork) -> None:
        """Appends a message."""
        with self.lock:
            self._waiting.append(message)

    def is_idle(self) -> bool:
        """Returns True if no message is running or waiting."""
        with self.lock:
            return self._runner is None and not self._waiting

    def start(self) -> None:
        """Starts a thread that runs the waiting messages, unless another thread runs them."""
        with self.lock:
            if self._waiting and self._runner is None:
                runner = threading.Thread(target=self._serve, name="paceline-messages", daemon=True)
                runner.start()
                self._runner = runner

    def run_up_to(self, message: MessageWork) -> None:
        """Runs a message and all before it in this thread, unless another thread does."""
        with self.lock:
            if self._runner is not None or message not in self._waiting:
                return
            self._runner = threading.current_thread()
        try:
            while True:
                with self.lock:
                    first = self._waiting.popleft()
                first.run()
                if first is message:
                    return
        finally:
            with self.lock:
                self._runner = None
                self._free.notify_all()
            self.start()  # runs messages added meanwhile, whose waiting threads saw this one running

    def join(self) -> None:
        """Waits until all messages have run; they fail, because the group is closed."""
        self.start()
        with self.lock:
            self._free.wait_for(lambda: self._runner in (None, threading.current_thread()))

    def _serve(self) -> None:
        while True:
            with self.lock:
                if not self._waiting:
                    self._runner = None
                    self._free.notify_all()
                    return
                first = self._waiting.popleft()
            first.run()


class Messenger:
    """Sends and receives the messages of a group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._queues: dict[str, _MessageQueue] = {}
        self._closed = False

    def send(self, tensor: Any, to: int, tag: int, timeout: float) -> MessageWork:
        """Sends a tensor; reads its memory until the message was sent."""
        array = elements_of(tensor)
        queue = self._queue(f"to rank {to}")

        def act(within: float = timeout) -> int:
            self._group.send(array, to, tag=tag, timeout=within)
            return to

        message = MessageWork(act, queue, [tensor])
        if array.nbytes <= _SMALL and queue.is_idle():
            try:
                act(0.0)
            except OperationTimeout:  # no room: the receiver is busy
                pass
            else:
                message = MessageWork(lambda: to, queue, [tensor])
                message.run()
                return message
        queue.put(message)
        queue.start()
        return message

    def recv(self, tensor: Any, source: int | None, tag: int, timeout: float) -> MessageWork:
        """Receives into a tensor; from any rank if `source` is None."""
        buffer = result_buffer(tensor)
        queue = self._queue(f"from {'any rank' if source is None else f'rank {source}'} with tag {tag}")

        def act() -> int:
            _, sender = self._group.recv(source, tag=tag, out=buffer.array, timeout=timeout)
            if buffer.copy_back is not None:
                buffer.copy_back()
            return sender

        message = MessageWork(act, queue, [tensor])
        queue.put(message)
        return message

    def start_pending(self) -> None:
        """Starts receives that no thread waits for yet; the group calls this when another operation starts."""
        if self._queues:
            for queue in list(self._queues.values()):
                queue.start()

    def close(self) -> None:
        """Refuses new messages; running ones fail when the group is closed."""
        with self._lock:
            self._closed = True

    def join(self) -> None:
        """Waits, after the group is closed, until all threads have ended."""
        for queue in list(self._queues.values()):
            queue.join()

    def _queue(self, route: str) -> _MessageQueue:
        with self._lock:
            if self._closed:
                raise SessionClosed("the process group is closed")
            queue = self._queues.get(route)
            if queue is None:
                queue = self._queues[route] = _MessageQueue(route)
            return queue


def only_tensor(tensors: Sequence[Any]) -> Any:
    """Returns the tensor of a message, which has one."""
    if len(tensors) != 1:
        raise PacelineError(f"a message is one tensor, not {len(tensors)}: send them one by one")
    return tensors[0]
