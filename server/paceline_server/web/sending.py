"""Long answers: how many bytes of them wait for those who asked, and for how long.

A trace has up to 64 MiB, and stays in memory until it is sent. Some who ask take it slowly, or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import weakref

from aiohttp import web

from paceline_server.errors import NoRoom
from paceline_server.limits import Budget
from paceline_server.web.web_limits import WebLimits

_log = logging.getLogger(__name__)

_PIECE_BYTES = 256 << 10
"""Bytes that are given to the connection at a time, since it keeps a copy of what the kernel does not take."""


class Sending:
    """The answers of a server that wait to be taken; `budget` counts their bytes by payer."""

    def __init__(self, limits: WebLimits) -> None:
        self.budget = Budget(limits.sending_bytes)
        self._seconds = limits.send_s

    def answer(self, request: web.Request, who: str, body: bytes | bytearray) -> web.StreamResponse:
        """Returns the answer that sends some JSON; raises `NoRoom` if too much waits for its payer already."""
        budget, size = self.budget, len(body)
        if not budget.take(who, size):
            raise NoRoom(
                f"no room for an answer of {_mib(size)}: answers of {_mib(budget.held(who))} wait for {who} to take "
                f"them, and of {_mib(budget.used)} for all, of {_mib(budget.total)} at most. Nobody may have more than "
                "is left free: ask again when they are taken"
            )
        answer = _LongAnswer(request, body, self._seconds)
        answer.taken = weakref.finalize(answer, budget.add, who, -size)  # also if it is never sent
        return answer


class _LongAnswer(web.StreamResponse):
    """JSON that is sent in pieces. The connection is cut if that takes more than some seconds."""

    taken: weakref.finalize[..., _LongAnswer]

    def __init__(self, request: web.Request, body: bytes | bytearray, seconds: float) -> None:
        super().__init__()
        self.content_type, self.charset = "application/json", "utf-8"
        self.content_length = len(body)
        self._request = request
        self._left = memoryview(b"" if request.method == "HEAD" else body)
        self._seconds = seconds

    async def write_eof(self, data: bytes = b"") -> None:
        """Sends all of it; aiohttp calls this after the headers."""
        try:
            async with asyncio.timeout(self._seconds):
                while self._left:
                    piece, self._left = self._left[:_PIECE_BYTES], self._left[_PIECE_BYTES:]
                    await self.write(piece)
                await super().write_eof(data)
        except TimeoutError:
            _log.info("an answer was not taken within %g s; its connection is cut", self._seconds)
            if self._request.transport is not None:
                self._request.transport.abort()
        finally:
            self._left = memoryview(b"")
            self.taken()


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g} MiB"
