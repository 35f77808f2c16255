"""Serves health probes, which are open to all callers: they need no token, wait for no turn and have no payer.

Some callers open probes and never send the request, or never read the answer. Such probes must not keep real ones out.
Only `MOST_PROBES` are open at a time; when one more comes, the connection that has the most probes loses its oldest.
A real prober has one or two, so it gets its answer even if others open thousands.
"""

from __future__ import annotations

import asyncio
from typing import Any

from paceline_server._grpc import EOF, aio, grpc
from paceline_server.limits import Places

PROBE = "/grpc.health.v1.Health/Check"

MOST_PROBES = 32
"""The most probes that are open at one time."""

_PATIENCE_S = 10.0
"""Seconds for a request to come in and its answer to be read, enough for a machine that stalls for seconds."""


class Probes:
    """All open probes. Each may take `patience_s` seconds."""

    def __init__(self, *, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._open: Places[asyncio.Timeout] = Places(MOST_PROBES)

    async def serve(self, inner: Any, context: aio.ServicerContext[Any, Any]) -> None:
        """Answers a probe through its handler, or ends it after `patience_s` or to make room for another."""
        try:
            async with asyncio.timeout(self._patience_s) as limit:
                if (oldest := self._open.take(context.peer(), limit)) is not None:
                    oldest.reschedule(asyncio.get_running_loop().time())
                try:
                    request: Any = await context.read()
                    if request is EOF:
                        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without a request")
                    await context.write(await inner(request, context))
                finally:
                    self._open.free(limit)
        except TimeoutError:
            text = (
                f"a probe takes {self._patience_s:g} s at most; if more than {MOST_PROBES} are open, the oldest one of "
                "the connection with the most probes is ended"
            )
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
