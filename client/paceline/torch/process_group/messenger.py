"""Messages of a process group: sends that do not block, and receives that run in the thread that waits for them.

torch does not say whether the caller waits for a message at once. A small one is sent in the caller's thread if there
is room for it; others are sent in order by one thread for each receiver. A receive runs in the thread that waits for
it. If that thread begins something else first, or waits with a timeout, the receive runs in a thread of its own, in
order with others of its source and tag.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline import Group
from paceline._wait import Latch
from paceline.errors import OperationTimeout, PacelineError, SessionClosed
from paceline.torch._tensors import Landing, elements_of
from paceline.torch._torch_work import Promise, for_torch, seconds_of
from paceline.torch.compiling import never_traced

__all__ = ["Message", "Messenger"]

_SMALL = 8 << 10
"""Most bytes of a message that is sent in the caller's thread: one frame, which is sent as a whole or not at all."""


@never_traced
class Message(dist.Work):  # type: ignore[misc]  # torch has no types here
    """One message that is being sent or received.

    Args:
        act: sends or receives it; returns the other side's rank.
        line: the queue that it is in.
        results: the tensors that are sent or filled.
    """

    def __init__(self, act: Callable[[], int], line: _Line, results: list[Any]) -> None:
        super().__init__()
        self._act: Callable[[], int] | None = act
        self._line = line
        self._results = results
        self._over = Latch()
        self._error: BaseException | None = None
        self._source = -1
        self._promises: list[Promise] = []

    def run(self) -> None:
        """Sends or receives it, in its turn."""
        act, self._act = self._act, None
        assert act is not None, "a message goes once"
        try:
            self._source = act()
        except BaseException as error:  # noqa: BLE001  it is raised by `wait`
            self._error = error
        finally:
            self._over.set()
        for promise in self._promises:
            promise.keep()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns True when it was received, or its tensor may be changed.

        Args:
            timeout: for this call; the message goes on after it. 0: as long as the group allows.

        Raises:
            OperationTimeout: it was not, in that time.
            PacelineError: the generation has failed.
        """
        within = seconds_of(timeout)
        if within is None:
            self._line.run_up_to(self)
        else:
            self._line.go_on()  # in a thread of its own: this one is to be back in time
        if not self._over.wait(within):
            late = OperationTimeout(f"a message was not through after {timeout.total_seconds():g} s")
            raise for_torch(late)
        self._value()
        for promise in self._promises:
            promise.settle()
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """True once it is over; looking makes it go on."""
        self._line.go_on()
        return self._over.is_set()

    def is_success(self) -> bool:
        """True if it is over, and well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Why it has failed; None if it has not, or not yet."""
        return for_torch(self._error) if self.is_completed() and self._error is not None else None

    def result(self) -> list[Any]:
        """The tensors."""
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Rank in the group of who sent it."""
        self.wait()
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future whose value is `result()`, or its error."""
        promise = Promise(self._value)
        with self._line.lock:
            self._promises.append(promise)
        if self._over.is_set():  # if it was not, `run` finds the promise
            promise.settle()
        self._line.go_on()
        return promise.future

    def _value(self) -> list[Any]:
        if self._error is not None:
            raise for_torch(self._error)
        return self._results


class _Line:
    """A queue of messages that must be handled in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._waiting: deque[Message] = deque()
        self._runner: threading.Thread | None = None
        self._free = threading.Condition(self.lock)

    def put(self, message: Message) -> None:
        """Appends a message."""
        with self.lock:
            self._waiting.append(message)

    def is_idle(self) -> bool:
        """True if no message is running or waiting."""
        with self.lock:
            return self._runner is None and not self._waiting

    def go_on(self) -> None:
        """Runs the waiting messages in a thread."""
        with self.lock:
            if self._waiting and self._runner is None:
                runner = threading.Thread(target=self._serve, name="paceline-messages", daemon=True)
                runner.start()
                self._runner = runner

    def run_up_to(self, message: Message) -> None:
        """Runs a message and all before it in this thread, unless another thread runs them."""
        me = threading.current_thread()
        with self.lock:
            if self._runner is not None or message not in self._waiting:
                return
            self._runner = me
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
            self.go_on()  # messages that were added meanwhile; a thread that waits for one has found this one running

    def end(self) -> None:
        """Waits until the queue's thread has ended, which it does because the group is closed and all messages fail."""
        self.go_on()
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
    """Sends and receives for a group.

    Args:
        group: the group whose messages it handles.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._lines: dict[Hashable, _Line] = {}
        self._closed = False

    def send(self, tensor: Any, to: int, tag: int, timeout: float) -> Message:
        """Sends a tensor; its memory is read until the message is over."""
        array = elements_of(tensor)
        line = self._line("send", to)

        def act(within: float = timeout) -> int:
            self._group.send(array, to, tag=tag, timeout=within)
            return to

        message = Message(act, line, [tensor])
        if array.nbytes <= _SMALL and line.is_idle():
            try:
                act(0.0)
            except OperationTimeout:  # no room: the receiver is busy
                pass
            else:
                message = Message(lambda: to, line, [tensor])
                message.run()
                return message
        line.put(message)
        line.go_on()
        return message

    def recv(self, tensor: Any, target: Landing, source: int | None, tag: int, timeout: float) -> Message:
        """Receives into a tensor; from any rank if `source` is None."""
        line = self._line("recv", source, tag)

        def act() -> int:
            _, sender = self._group.recv(source, tag=tag, out=target.array, timeout=timeout)
            if target.finish is not None:
                target.finish()
            return sender

        message = Message(act, line, [tensor])
        line.put(message)
        return message

    def go_on(self) -> None:
        """Starts receives that no thread waits for yet, because the caller begins something else."""
        if self._lines:
            for line in list(self._lines.values()):
                line.go_on()

    def close(self) -> None:
        """Refuses new messages; running ones fail when the group is closed."""
        with self._lock:
            self._closed = True

    def end(self) -> None:
        """Waits, after the group is closed, until all threads have ended."""
        for line in list(self._lines.values()):
            line.end()

    def _line(self, *key: Hashable) -> _Line:
        with self._lock:
            if self._closed:
                raise SessionClosed("the process group is closed")
            line = self._lines.get(key)
            if line is None:
                line = self._lines[key] = _Line()
            return line


def check_alone(tensors: list[Any]) -> Any:
    """The one tensor of a message.

    Raises:
        PacelineError: there are several, or none.
    """
    if len(tensors) != 1:
        raise PacelineError(f"a message is one tensor, not {len(tensors)}")
    return tensors[0]
