"""Calls to a member's door that is crowded: it refuses with UNAVAILABLE, and means that one may knock again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paceline._grpc import aio, grpc
from paceline.errors import LimitExceeded
from paceline.session.wire import error_from_status

__all__ = ["is_crowded", "once_let_in"]

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
"""Between two tries: doubled each time."""


async def once_let_in(call: Callable[[], Awaitable[T]], patience: float) -> T:
    """What the call gives, tried again for so many seconds while the door is crowded. Nobody at the door is no crowd.

    Raises:
        AioRpcError: it was still crowded, or the call failed otherwise; anything else that the call raises.
    """
    loop = asyncio.get_running_loop()
    end, pause = loop.time() + patience, _FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except aio.AioRpcError as error:
            if not is_crowded(error) or loop.time() + pause > end:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def is_crowded(error: aio.AioRpcError) -> bool:
    """True if a door has refused for the crowd. Of one that is not there grpc says so too, without a reason."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and isinstance(error_from_status(error, ""), LimitExceeded)
