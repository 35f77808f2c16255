"""Unary calls come in whole within a time, and are served at a pace: a little later, if one connection sends too many.

grpc hands a unary call over when its request is complete, and waits for that as long as the caller likes, with what has
come so far in memory. So unary handlers are served as streams of one message, which is waited for here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from paceline_server._grpc import EOF, aio, grpc
from paceline_server.pacing import Pacers
from paceline_server.settings import ServerSettings

__all__ = ["PacingInterceptor"]

_OPEN = "/grpc.health.v1.Health/"
"""Probes are few, and must not wait."""

_MOST_CONNECTIONS = 20_000
"""Whose pace is remembered: each takes 0.3 KB."""


class PacingInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Paces unary calls by connection. Messages of a session's stream are paced where they are read.

    Args:
        settings: the rates, and the time for a request to come in.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._pacers = Pacers(settings.call_rate, settings.call_burst, _MOST_CONNECTIONS)
        self._patience = settings.first_message_time

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Lets unary calls wait for their turn."""
        handler = await continuation(handler_call_details)
        # grpc gives None for a method that nobody serves; its stubs do not say so.
        if not handler or handler.unary_unary is None:
            return handler
        pacers = None if handler_call_details.method.startswith(_OPEN) else self._pacers
        paced: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self._paced(handler.unary_unary, pacers), handler.request_deserializer, handler.response_serializer
        )
        return paced

    def _paced(self, inner: Any, pacers: Pacers | None) -> Any:
        async def handle(_: object, context: aio.ServicerContext[Any, Any]) -> None:
            request: object = EOF
            try:
                async with asyncio.timeout(self._patience):
                    request = await context.read()
            except TimeoutError:
                text = f"the request did not come in within {self._patience:g} s"
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
            if request is EOF:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without a request")
            if pacers is not None and (delay := pacers.delay(context.peer(), asyncio.get_running_loop().time())):
                await asyncio.sleep(delay)
            await context.write(await inner(request, context))

        return handle
