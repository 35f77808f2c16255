"""Probes of health, which are open to all: a few at a time, each for a moment. Nobody pays for them, and none waits.

Whoever keeps one open, by a request that does not come or an answer that is not read, holds up nobody: as soon as there
are too many, the oldest gives way. An honest probe comes in whole, and is answered before that.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from paceline_server._grpc import EOF, aio, grpc
from paceline_server.services.refusals import refuse
from paceline_server.services.sizes import TooLong

__all__ = ["MOST_PROBES", "PROBE", "Probes"]

PROBE = "/grpc.health.v1.Health/Check"

MOST_PROBES = 32
"""At one time. grpc may hold a MiB of each."""

_PATIENCE_S = 1.0


class Probes:
    """Those that are open."""

    def __init__(self) -> None:
        self._open: OrderedDict[asyncio.Timeout, None] = OrderedDict()  # the oldest first

    async def serve(self, inner: Any, context: aio.ServicerContext[Any, Any]) -> None:
        """Answers one by its handler, or ends it."""
        try:
            async with asyncio.timeout(_PATIENCE_S) as limit:
                self._open[limit] = None
                if len(self._open) > MOST_PROBES:
                    oldest, _ = self._open.popitem(last=False)
                    oldest.reschedule(asyncio.get_running_loop().time())
                try:
                    request: Any = await context.read()
                    if isinstance(request, TooLong):
                        await refuse(context, request.refusal())
                    if request is EOF:
                        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without a request")
                    await context.write(await inner(request, context))
                finally:
                    self._open.pop(limit, None)
        except TimeoutError:
            text = (
                f"a probe takes {_PATIENCE_S:g} s at most, and is the first to end if there are more than {MOST_PROBES}"
            )
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
