"""The channel to the coordinator: replaced for each attempt to reconnect, and calls move to the new one.

While a name does not resolve, gRPC looks it up again only after a pause that grows to many seconds and cannot be set.
A new channel looks it up at once, so each attempt to reach the coordinator makes one. That look-up is done once, and
takes long if the query is lost; so the channel is made only after the name has resolved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paceline._address import parse_endpoint
from paceline._grpc import aio
from paceline._lookup import look_up_within
from paceline._rpc import channel_options
from paceline.credentials import Credentials

__all__ = ["CoordinatorChannel"]

T = TypeVar("T")


class CoordinatorChannel:
    """The channel of one session to its coordinator; on the loop.

    Args:
        target: the coordinator, "host:port".
        failure_timeout: seconds without an acknowledgement after which a connection ends.
        credentials: with which this worker and the coordinator authenticate each other.

    Attributes:
        newest: the present channel. Use `call` for unary calls, whose channel may be replaced meanwhile.
    """

    def __init__(self, target: str, failure_timeout: float, credentials: Credentials) -> None:
        self._target = target
        self._host = parse_endpoint(target).host
        self._failure_timeout = failure_timeout
        self._credentials = credentials
        self._closing: set[asyncio.Task[None]] = set()
        self.newest = credentials.coordinator_channel(target, channel_options(failure_timeout))

    async def renew(self, timeout: float) -> None:
        """Replaces the channel by a new one, which looks up the coordinator's present address.

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
        """Performs a call that may be repeated; repeats it if its channel is replaced meanwhile.

        Args:
            make: makes the call on the channel that it is given, and limits the remaining time itself.

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
        """Closes all channels, which ends calls that are under way."""
        await asyncio.gather(*self._closing, self.newest.close(None))
