"""Calls that may hang for good, of a file on a network that is away or a resolver in trouble: each has a daemon thread.

In asyncio's pool a few of them would hold up all that wait for it, and any would keep the process from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["call_apart", "start_apart"]

T = TypeVar("T")


def start_apart(call: Callable[[], T], name: str) -> Future[T]:
    """Begins the call on a thread of that name; its result, or whatever it raises, is in the future.

    Raises:
        RuntimeError: there are too many threads.
    """
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # whoever stops waiting does not stop the thread

    def run() -> None:
        try:
            found = call()
        except BaseException as error:  # noqa: BLE001  whoever waits shall hear of it, whatever it is
            answer.set_exception(error)
        else:
            answer.set_result(found)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


async def call_apart(call: Callable[[], T], name: str, patience: float) -> T:
    """Waits for the call, for `patience` seconds at most.

    Raises:
        TimeoutError: it has not come back; its thread stays until it does.
        RuntimeError: there are too many threads.
    """
    async with asyncio.timeout(patience):
        return await asyncio.wrap_future(start_apart(call, name))
