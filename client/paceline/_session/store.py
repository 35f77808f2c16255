"""The job's key-value store, as a worker sees it: at the coordinator, or in memory in a world of one."""

from __future__ import annotations

import abc
import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent import futures
from typing import Any

from paceline import errors
from paceline._base.processes import check_process
from paceline._base.rpc import aio, backoff, duration, error_from_status, grpc, is_transient
from paceline._base.waits import LoopThread
from paceline._session.connection import CoordinatorChannel
from paceline.config import checked_timeout
from pacelinepb.pieces import MESSAGE_BYTES, cut, in_messages
from pacelinepb.v1 import store_pb2 as pb
from pacelinepb.v1 import store_pb2_grpc

_MOST_BYTES = (1 << 20) + (15 << 10)
"""Largest request. The coordinator refuses a value that is a little too long; a far longer one is not sent."""

_LONG = frozenset(
    method.name for method in pb.DESCRIPTOR.services_by_name["StoreService"].methods if method.client_streaming
)
"""Calls whose request may take several messages."""

_WRITES = 16
"""Writes that may be open at once: the coordinator keeps the answers of so many (`store.proto`)."""

_SLACK = 5.0
"""Seconds that a call may take beyond the timeout sent to the coordinator, whose own error says more."""


class Store(abc.ABC):
    """Keys (text, up to 1,024 bytes) and values (bytes, up to 1 MiB) shared by a job's members.

    Calls are linearizable: each happens once, at one moment between its beginning and its end, for all members alike,
    also if the coordinator is restarted on its state file or another one takes over. A write that fails because the
    coordinator does not answer may have happened, or may happen later.
    """

    @abc.abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Sets a key.

        Raises:
            LimitExceeded: the key or the value is too long, or the job has too many keys.
        """

    @abc.abstractmethod
    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """Returns the value of a key, and waits until it is set.

        Args:
            key: the key.
            timeout: seconds to wait; None for the session's `call_timeout`.

        Raises:
            OperationTimeout: the key was not set in time.
        """

    @abc.abstractmethod
    def add(self, key: str, amount: int = 1) -> int:
        """Adds to an integer, kept as decimal text (missing counts as 0), and returns the sum.

        Raises:
            PacelineError: the key holds something else.
        """

    @abc.abstractmethod
    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> tuple[bool, bytes | None]:
        """Sets a key if it holds `expected` (None: if it is missing).

        Returns:
            True if this call set it, and the value afterwards (None: missing).
        """

    @abc.abstractmethod
    def wait(self, keys: Sequence[str], *, timeout: float | None = None) -> None:
        """Waits until all keys exist.

        Raises:
            OperationTimeout: some did not appear in time; the text names them.
        """

    @abc.abstractmethod
    def delete(self, key: str) -> bool:
        """Deletes a key; False if it was not there."""


class CoordinatorStore(Store):
    """The store at the coordinator. While the coordinator is away, each call is repeated until its timeout.

    Each write has a number, by which the coordinator recognises a repeat. There are `_WRITES` rows of numbers, each of
    which has one open write: so a repeat comes before the next number of its row.
    """

    def __init__(self, thread: LoopThread, channel: CoordinatorChannel, caller: pb.Caller, call_timeout: float) -> None:
        self._thread = thread
        self._channel = channel
        self._caller = caller
        self._call_timeout = call_timeout
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(1, _WRITES + 1):
            self._numbers.put(number)
        self._closed = False

    def close(self) -> None:
        """Refuses every later call, because the session has ended."""
        self._closed = True

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        self._write("set", "Set", pb.SetRequest(caller=self._caller, key=key, value=cut(value)))

    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """See `Store.get`."""
        wait = checked_timeout(self._call_timeout if timeout is None else timeout)
        request = pb.GetRequest(caller=self._caller, key=key, timeout=duration(wait))
        answer: pb.GetResponse = self._call(f"get {key!r}", "Get", request, wait + _SLACK)
        return answer.value

    def add(self, key: str, amount: int = 1) -> int:
        """See `Store.add`."""
        request = pb.AddRequest(caller=self._caller, key=key, amount=amount)
        answer: pb.AddResponse = self._write("add", "Add", request)
        return answer.value

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> tuple[bool, bytes | None]:
        """See `Store.compare_set`."""
        request = pb.CompareSetRequest(
            caller=self._caller,
            key=key,
            expected=None if expected is None else cut(expected),
            desired=cut(desired),
        )
        while True:
            answer: pb.CompareSetResponse = self._write("compare_set", "CompareSet", request)
            value = answer.value if answer.HasField("value") else None
            if answer.swapped or value != expected:
                return answer.swapped, value
            # A repeat was answered: the key held another value at the first try, and has the expected one since.

    def wait(self, keys: Sequence[str], *, timeout: float | None = None) -> None:
        """See `Store.wait`."""
        wait = checked_timeout(self._call_timeout if timeout is None else timeout)
        self._call(
            "wait", "Wait", pb.WaitRequest(caller=self._caller, keys=keys, timeout=duration(wait)), wait + _SLACK
        )

    def delete(self, key: str) -> bool:
        """See `Store.delete`."""
        request = pb.DeleteRequest(caller=self._caller, key=key)
        answer: pb.DeleteResponse = self._write("delete", "Delete", request)
        return answer.existed

    def _write(self, name: str, method: str, request: Any) -> Any:
        check_process()
        deadline = time.monotonic() + self._call_timeout
        try:
            number = self._numbers.get(timeout=self._call_timeout)
        except queue.Empty:
            raise errors.CoordinatorUnreachable(
                f"store.{name}: {_WRITES} earlier writes of this worker have no answer after {self._call_timeout:g} s"
            ) from None
        request.call = number
        try:
            return self._call(name, method, request, deadline - time.monotonic())
        finally:
            self._numbers.put(number + _WRITES)

    def _call(self, name: str, method: str, request: Any, seconds: float) -> Any:
        check_process()
        if self._closed:
            raise errors.SessionClosed(f"store.{name}: the session has ended")
        if (size := request.ByteSize()) > _MOST_BYTES:
            raise errors.LimitExceeded(f"store.{name}: {size} bytes in one call; a value has at most 1 MiB")
        messages = in_messages(request)
        if any(message.ByteSize() > MESSAGE_BYTES for message in messages):
            raise errors.LimitExceeded(f"store.{name}: a key has at most 1,024 bytes")
        deadline = time.monotonic() + seconds
        try:
            return self._thread.run(self._repeat(f"store.{name}", method, messages, deadline))
        except (futures.CancelledError, aio.UsageError):  # the channel was closed during the call
            raise errors.SessionClosed(f"store.{name}: the session has ended") from None

    async def _repeat(self, name: str, method: str, messages: list[Any], deadline: float) -> Any:
        """Repeats a call. Reads may be repeated anyway; a write has a number, so that it is made once."""

        def call(channel: aio.Channel) -> Awaitable[Any]:
            left = max(0.05, deadline - time.monotonic())
            make = getattr(store_pb2_grpc.StoreServiceStub(channel), method)
            request = iter(messages) if method in _LONG else messages[0]
            answer: Awaitable[Any] = make(request, timeout=left, wait_for_ready=True)
            return answer

        attempt = 0
        while True:
            try:
                answer = await self._channel.call(call)
            except aio.AioRpcError as error:
                if not is_transient(error) or time.monotonic() >= deadline:
                    raise error_from_status(error, name) from error
                if len(messages) > 1 and error.code() is grpc.StatusCode.INTERNAL:
                    # grpc reports a refusal during the upload as a failed write. A short call gets the reason.
                    nothing = pb.WaitRequest(caller=self._caller, timeout=duration(0))
                    await self._repeat(name, "Wait", [nothing], deadline)
            else:
                if answer is not None:
                    return answer
                if time.monotonic() >= deadline:  # grpc returns None for bytes that are no answer
                    raise errors.CoordinatorUnreachable(f"{name}: the coordinator's answer cannot be read")
            await asyncio.sleep(backoff(attempt))
            attempt += 1


class MemoryStore(Store):
    """The store in a world of one."""

    def __init__(self, call_timeout: float) -> None:
        self._call_timeout = call_timeout
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """See `Store.get`."""
        self.wait([key], timeout=timeout)
        return self._values[key]

    def add(self, key: str, amount: int = 1) -> int:
        """See `Store.add`."""
        with self._changed:
            try:
                total = int(self._values.get(key, b"0")) + amount
            except ValueError:
                raise errors.PacelineError(f"store.add: {key!r} holds no integer") from None
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> tuple[bool, bytes | None]:
        """See `Store.compare_set`."""
        with self._changed:
            swapped = self._values.get(key) == expected
            if swapped:
                self._values[key] = bytes(desired)
                self._changed.notify_all()
            return swapped, self._values.get(key)

    def wait(self, keys: Sequence[str], *, timeout: float | None = None) -> None:
        """See `Store.wait`."""
        seconds = checked_timeout(self._call_timeout if timeout is None else timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), seconds):
                missing = [key for key in keys if key not in self._values]
                raise errors.OperationTimeout(f"store: {', '.join(map(repr, missing))} not set within {seconds} s")

    def delete(self, key: str) -> bool:
        """See `Store.delete`."""
        with self._changed:
            return self._values.pop(key, None) is not None
