"""A fourth kind of link, as somebody would add it: frames between threads of one process, by reference.

It shows what a kind has to say and no more. Register it with `paceline._links.registry.register`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline._links.base import LinkEnded
from paceline._links.fault import Fault
from paceline._links.frame import Frame
from paceline._links.kind import Incoming, Kind, LinkContext, Outgoing
from paceline._links.local import Pipe
from paceline.config import Config
from paceline.credentials import Credentials
from paceline.errors import LinkUnavailable
from pacelinepb.v1 import peer_pb2

__all__ = ["ThreadsKind"]


class _ThreadsOutgoing(Outgoing):
    kind = "threads"

    def __init__(self, pipe: Pipe, fault: Fault) -> None:
        self.frames = self.sent_bytes = 0
        self._pipe = pipe
        self._fault = fault

    def send(self, frame: Frame, deadline: float) -> None:
        self._put(replace(frame, payload=bytes(frame.payload)), deadline, lent=False)

    def lend(self, frame: Frame, deadline: float) -> None:
        self._put(frame, deadline, lent=True)

    def _put(self, frame: Frame, deadline: float, *, lent: bool) -> None:
        self._fault.check()
        self._pipe.put(frame, deadline, self._fault, lent=lent)
        self.frames += 1
        self.sent_bytes += len(frame.payload)

    def await_release(self, deadline: float) -> None:
        self._pipe.await_release(deadline, self._fault)

    def recall(self) -> None:
        self._pipe.recall()

    def flush(self, deadline: float) -> None:
        """The peer has all."""

    def wake(self) -> None:
        self._pipe.wake()

    def end(self, error: LinkEnded) -> None:
        self._pipe.end(orderly=error.orderly)

    def close(self) -> None:
        """Nothing to give back."""


class _ThreadsIncoming(Incoming):
    kind = "threads"

    def __init__(self, pipe: Pipe, fault: Fault) -> None:
        self._pipe = pipe
        self._fault = fault

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        self._fault.check()
        frame = self._pipe.get(deadline, self._fault)
        if into is None or len(into) != len(frame.payload):
            return frame
        into[:] = frame.payload
        self._pipe.release()
        return replace(frame, payload=into)

    def release(self) -> None:
        self._pipe.release()

    def on_readable(self, notify: Callable[[], None]) -> None:
        self._pipe.on_change = notify
        notify()

    def wake(self) -> None:
        self._pipe.wake()

    def end(self, error: LinkEnded, frames: int | None = None) -> None:
        self._pipe.end(orderly=error.orderly)

    def close(self) -> None:
        self._pipe.release()


class ThreadsKind(Kind):
    """See `Kind`."""

    name = "threads"
    number: Any = 100  # of peer.proto, for a kind that is to stay
    preference = 40

    _expected: dict[bytes, tuple[Fault, Callable[[Incoming], None]]] = {}  # noqa: RUF012  of the process
    """By ticket; what a socket would be for another kind."""

    def __init__(self, config: Config, credentials: Credentials) -> None:
        pass

    def offer(self, context: LinkContext, hello: peer_pb2.HelloRequest) -> bool:
        return context.node == context.peer.node

    def expect(
        self, hello: peer_pb2.HelloRequest, context: LinkContext, ticket: bytes, on_open: Callable[[Incoming], None]
    ) -> peer_pb2.HelloResponse | None:
        self._expected[ticket] = context.fault, on_open
        return peer_pb2.HelloResponse()

    async def open(
        self, answer: peer_pb2.HelloResponse, context: LinkContext, stream: object, timeout: float
    ) -> Outgoing:
        if answer.ticket not in self._expected:
            raise LinkUnavailable(f"{context.peer} is no thread of this process")
        fault, on_open = self._expected.pop(answer.ticket)
        pipe = Pipe()
        on_open(_ThreadsIncoming(pipe, fault))
        return _ThreadsOutgoing(pipe, context.fault)
