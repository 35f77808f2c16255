"""Every connection may call so often; calls beyond that are served a little later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from paceline_server._grpc import aio, grpc
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
        settings: the rates.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._pacers = Pacers(settings.call_rate, settings.call_burst, _MOST_CONNECTIONS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Lets unary calls wait for their turn."""
        handler = await continuation(handler_call_details)
        # grpc gives None for a method that nobody serves; its stubs do not say so.
        if not handler or handler.unary_unary is None or handler_call_details.method.startswith(_OPEN):
            return handler
        paced: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
            self._paced(handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )
        return paced

    def _paced(self, inner: Any) -> Any:
        async def handle(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            delay = self._pacers.delay(context.peer(), asyncio.get_running_loop().time())
            if delay:
                await asyncio.sleep(delay)
            return await inner(request, context)

        return handle
