"""The channel to the coordinator: the newest of them, and calls that go over to it from one that is given up.

grpc looks a name up again only after a pause, which grows to many seconds while it does not resolve and cannot be set.
A new channel looks it up at once: so there is one for each attempt to reach a coordinator that stays away. It asks but
once, and for long if the question gets lost; so it is made when the name resolves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paceline._grpc import aio
from paceline.credentials import Credentials
from paceline.session.address import parse_endpoint
from paceline.session.lookup import look_up_within
from paceline.session.wire import channel_options

__all__ = ["CoordinatorChannel"]

T = TypeVar("T")


class CoordinatorChannel:
    """Of one session; on the loop.

    Args:
        target: the coordinator, "host:port".
        failure_timeout: seconds without an acknowledgement after which a connection ends.
        credentials: by what this worker and the coordinator know each other.

    Attributes:
        newest: the channel to call on. For unary calls `call` is better: their channel may be given up under them.
    """

    def __init__(self, target: str, failure_timeout: float, credentials: Credentials) -> None:
        self._target = target
        self._host = parse_endpoint(target).host
        self._failure_timeout = failure_timeout
        self._credentials = credentials
        self._closing: set[asyncio.Task[None]] = set()
        self.newest = credentials.coordinator_channel(target, channel_options(failure_timeout))

    async def renew(self, timeout: float) -> None:
        """Gives the channel up for a new one, which finds the coordinator where it is now.

        Raises:
            OSError: its name does not resolve within so many seconds.
        """
        await look_up_within(self._host, timeout)
        old = self.newest
        options = channel_options(self._failure_timeout, alone=True)
        self.newest = self._credentials.coordinator_channel(self._target, options)
        task = asyncio.ensure_future(old.close(None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def call(self, make: Callable[[aio.Channel], Awaitable[T]]) -> T:
        """Performs a call that may be repeated; again if its channel is given up meanwhile.

        Args:
            make: makes the call on that channel; it sees to the time that is left.

        Raises:
            CancelledError: the caller does not wait any more, or the session is over.
            AioRpcError: as the call does.
        """
        while True:
            channel = self.newest
            try:
                return await make(channel)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if channel is self.newest or (task is not None and task.cancelling()):
                    raise

    async def close(self) -> None:
        """Calls that are under way end."""
        await asyncio.gather(*self._closing, self.newest.close(None))
