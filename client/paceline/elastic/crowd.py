"""Repeats calls to a member that refuses them because it is overloaded (status UNAVAILABLE with the reason LIMIT)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paceline._grpc import aio, grpc
from paceline._rpc import error_from_status
from paceline.errors import LimitExceeded

__all__ = ["is_overloaded", "retry_while_overloaded"]

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
"""Pauses between two tries: the first, doubled after each try up to the longest."""


async def retry_while_overloaded(call: Callable[[], Awaitable[T]], patience: float) -> T:
    """Returns the call's result, and repeats the call for up to `patience` seconds while the member is overloaded.

    A refused connection is not overload: it is raised at once.

    Raises:
        AioRpcError: the member was still overloaded, or the call failed otherwise; anything else that the call raises.
    """
    loop = asyncio.get_running_loop()
    end, pause = loop.time() + patience, _FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except aio.AioRpcError as error:
            if not is_overloaded(error) or loop.time() + pause > end:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def is_overloaded(error: aio.AioRpcError) -> bool:
    """True if a member refused the call because it is overloaded.

    For a member that cannot be reached, gRPC reports UNAVAILABLE too, but without a reason.
    """
    return error.code() is grpc.StatusCode.UNAVAILABLE and isinstance(error_from_status(error, ""), LimitExceeded)
