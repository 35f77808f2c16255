"""The outgoing side of one session's stream: a bounded queue that one writer empties.

Pushing never blocks, so a slow reader holds up no other session. This module knows nothing of gRPC.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from paceline_server.errors import LimitMet
from pacelinepb.v1 import session_pb2 as pb


class SessionStream:
    """A stream that carries a session, by its `number`; it ends if more than `limit` messages wait."""

    __slots__ = ("_closed", "_end", "_epoch", "_limit", "_queue", "_ready", "job", "member_id", "number")

    def __init__(self, number: int, job: str, member_id: str, limit: int, epoch: int = 0) -> None:
        self.number = number
        self.job = job
        self.member_id = member_id
        self._limit = limit
        self._epoch = epoch
        self._queue: deque[pb.SessionResponse] = deque()
        self._ready: asyncio.Future[None] | None = None
        self._closed = False
        self._end: BaseException | None = None

    def push(self, message: pb.SessionResponse) -> None:
        """Queues a message; drops it if the stream is closed."""
        if self._closed:
            return
        if len(self._queue) >= self._limit:
            self._queue.clear()
            self.close(LimitMet(f"the member has not read its last {self._limit} messages"))
            return
        if self._epoch:
            message.epoch = self._epoch
        self._queue.append(message)
        self._wake()

    def close(self, end: BaseException | None = None) -> None:
        """Ends the stream once the queued messages are written; only the first call counts. `messages` raises `end`."""
        if not self._closed:
            self._closed, self._end = True, end
            self._wake()

    async def messages(self) -> AsyncIterator[pb.SessionResponse]:
        """Yields the messages until the stream is closed. Only one writer may iterate."""
        while True:
            while self._queue:
                yield self._queue.popleft()
            if self._closed:
                break
            self._ready = asyncio.get_running_loop().create_future()
            await self._ready
        if self._end is not None:
            raise self._end

    def _wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
