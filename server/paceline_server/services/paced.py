"""Calls are served at a pace: a little later, if one connection makes too many. Unary ones come in whole within a time.

grpc hands a unary call over when its request is complete, and waits for that as long as the caller likes, with what has
come so far in memory. So unary handlers are served as streams of one message, which is waited for here. Streams wait
for their turn before anything of them is read: a refusal for want of a token is one, and costs us as much as an answer.
What is longer than its method may be is not parsed (`sizes`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from paceline_server._grpc import EOF, aio, grpc
from paceline_server.pacing import Pacers
from paceline_server.services.refusals import refuse
from paceline_server.services.sizes import TooLong, bounded, most_bytes
from paceline_server.settings import ServerSettings

__all__ = ["PacingInterceptor"]

_PROBE = "/grpc.health.v1.Health/Check"
"""Probes are few, and must not wait."""

_MOST_CONNECTIONS = 20_000
"""Whose pace is remembered: each takes 0.3 KB."""


class PacingInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Paces calls by connection. Messages of a session's stream are paced where they are read.

    Args:
        settings: the rates, the time for a request to come in, and how long it may be.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._pacers = Pacers(settings.call_rate, settings.call_burst, _MOST_CONNECTIONS)
        self._patience = settings.first_message_time
        self._settings = settings

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Lets calls wait for their turn."""
        handler = await continuation(handler_call_details)
        if not handler:  # grpc gives None for a method that nobody serves; its stubs do not say so
            return handler
        pacers = None if handler_call_details.method == _PROBE else self._pacers
        if handler.unary_unary is not None:
            inner: Any = self._answering(handler.unary_unary, pacers)
        elif handler.unary_stream is not None:
            inner = self._reading(handler.unary_stream, pacers)
        else:
            assert handler.stream_stream is not None, "no service here has a method with a stream and one answer"
            inner = _opening(handler.stream_stream, pacers)
        paced: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            inner,
            bounded(handler.request_deserializer, most_bytes(self._settings, handler_call_details.method)),
            handler.response_serializer,
        )
        return paced

    def _answering(self, inner: Any, pacers: Pacers | None) -> Any:
        async def answer(request: Any, context: aio.ServicerContext[Any, Any]) -> None:
            await context.write(await inner(request, context))

        return self._reading(answer, pacers)

    def _reading(self, inner: Any, pacers: Pacers | None) -> Any:
        """For a handler of one request; what it answers it writes to the context."""

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
            if isinstance(request, TooLong):
                await refuse(context, request.refusal())
            await _turn(context, pacers)
            await inner(request, context)

        return handle


def _opening(inner: Any, pacers: Pacers | None) -> Any:
    """For a handler of a stream: it is not called before its turn."""

    async def handle(requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
        await _turn(context, pacers)
        await inner(requests, context)

    async def generate(requests: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await _turn(context, pacers)
        async for answer in inner(_short(requests, context), context):
            yield answer

    return generate if inspect.isasyncgenfunction(inner) else handle


async def _short(requests: AsyncIterator[Any], context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
    """The requests of a stream; the first that is too long ends the call."""
    async for request in requests:
        if isinstance(request, TooLong):
            await refuse(context, request.refusal())
        yield request


async def _turn(context: aio.ServicerContext[Any, Any], pacers: Pacers | None) -> None:
    if pacers is not None and (delay := pacers.delay(context.peer(), asyncio.get_running_loop().time())):
        await asyncio.sleep(delay)
