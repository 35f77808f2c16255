"""Runs calls that may hang for good, each on a daemon thread of its own: a network file, a resolver in trouble.

In asyncio's pool a few such calls would hold up all others, and a single one would keep the process from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_apart(call: Callable[[], T], name: str) -> Future[T]:
    """Starts the call on a thread of that name; the future has its result, or the exception that it raised.

    Raises RuntimeError if there are too many threads.
    """
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # a caller that stops waiting does not stop the thread

    def run() -> None:
        try:
            found = call()
        except BaseException as error:  # noqa: BLE001  the caller must hear of it, whatever it is
            answer.set_exception(error)
        else:
            answer.set_result(found)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


async def call_apart(call: Callable[[], T], name: str, patience: float) -> T:
    """Waits for the call, for `patience` seconds at most; on TimeoutError its thread stays until the call returns."""
    async with asyncio.timeout(patience):
        return await asyncio.wrap_future(start_apart(call, name))
