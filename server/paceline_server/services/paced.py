"""Calls are served at a pace, a little later if one payer makes too many, and within what memory he may have (`calls`).

grpc hands a unary call over when its request is complete, and waits for that as long as the caller likes, with what has
come so far in memory. So unary handlers are served as streams of one message, which is waited for here, and for a time
only. Streams wait for their turn before anything of them is read: a refusal for want of a token is one, and costs us as
much as an answer. What is longer than its method may be is not parsed (`sizes`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from paceline_server._grpc import EOF, aio, grpc
from paceline_server.errors import NoRoom
from paceline_server.pacing import Pacers
from paceline_server.security.authenticate import authorization_of
from paceline_server.services.calls import OpenCall, OpenCalls
from paceline_server.services.probes import PROBE, Probes
from paceline_server.services.refusals import refuse
from paceline_server.services.sizes import TooLong, bounded, most_bytes
from paceline_server.settings import ServerSettings

__all__ = ["PacingInterceptor"]

_Serve = Callable[[Any, "aio.ServicerContext[Any, Any]", OpenCall], Awaitable[None]]

_LASTING = frozenset(f"/pacelinepb.v1.StoreService/{method}" for method in ("Get", "Wait"))
"""Unary calls that wait for others, as streams do."""

_MOST_PAYERS = 20_000
"""Whose pace is remembered: each takes 0.3 KB."""


class PacingInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Paces calls by payer, but for probes. Messages of a session's stream are paced where they are read.

    Args:
        settings: the rates, the time for a request to come in, and how long it may be.
        calls: those that are open.
        payer_of: who pays for a call, by its `authorization` and its peer.
    """

    def __init__(self, settings: ServerSettings, calls: OpenCalls, payer_of: Callable[[str | None, str], str]) -> None:
        self._pacers = Pacers(settings.call_rate, settings.call_burst, _MOST_PAYERS)
        self._settings = settings
        self._calls = calls
        self._payer_of = payer_of
        self._probes = Probes()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Lets calls wait for their turn."""
        handler = await continuation(handler_call_details)
        if not handler:  # grpc gives None for a method that nobody serves; its stubs do not say so
            return handler
        method, authorization = handler_call_details.method, authorization_of(handler_call_details)
        lasts = handler.unary_unary is None or method in _LASTING
        if handler.unary_unary is not None:
            serve = self._answering(handler.unary_unary)
        elif handler.unary_stream is not None:
            serve = self._reading(handler.unary_stream)
        else:
            assert handler.stream_stream is not None, "no service here has a method with a stream and one answer"
            serve = _streaming(handler.stream_stream)

        async def probe(_: object, context: aio.ServicerContext[Any, Any]) -> None:
            await self._probes.serve(handler.unary_unary, context)

        async def count(requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
            payer = self._payer_of(authorization, context.peer())
            try:
                with self._calls.one(payer, lasts) as call:
                    if delay := self._pacers.delay(payer, asyncio.get_running_loop().time()):
                        await asyncio.sleep(delay)
                    await serve(requests, context, call)
            except NoRoom as refused:
                await refuse(context, refused)

        async def handle(requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
            try:
                await (probe if method == PROBE else count)(requests, context)
            except aio.AbortError as ended:
                # grpc keeps it with the call, and the frames that it has passed know the call: a circle, in which the
                # request would stay until all garbage is collected.
                ended.__context__ = None
                raise ended.with_traceback(None) from None

        paced: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            handle,
            bounded(handler.request_deserializer, most_bytes(self._settings, method)),
            handler.response_serializer,
        )
        return paced

    def _answering(self, inner: Any) -> _Serve:
        async def answer(request: Any, context: aio.ServicerContext[Any, Any], call: OpenCall) -> None:
            response = await inner(request, context)
            call.take_message(len(response) if isinstance(response, bytes) else response.ByteSize())
            await context.write(response)

        return self._reading_for(answer)

    def _reading(self, inner: Any) -> _Serve:
        """For a handler of one request that writes what it answers to the context."""
        return self._reading_for(lambda request, context, _: inner(request, context))

    def _reading_for(self, inner: Callable[[Any, Any, OpenCall], Awaitable[None]]) -> _Serve:
        patience = self._settings.first_message_time

        async def serve(_: object, context: aio.ServicerContext[Any, Any], call: OpenCall) -> None:
            request: object = EOF
            try:
                async with call.room(), asyncio.timeout(patience):
                    request = await context.read()
            except TimeoutError:
                text = f"the request did not come in within {patience:g} s; other callers need its room"
                await refuse(context, NoRoom(text))  # of a worker that was cut off or stopped: it makes the call again
            if request is EOF:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without a request")
            if isinstance(request, TooLong):
                await refuse(context, request.refusal())
            call.take_message(request.ByteSize() if isinstance(request, Message) else 0)  # else it is refused at once
            await inner(request, context, call)

        return serve


def _streaming(inner: Any) -> _Serve:
    """For a handler of a stream: it reads and writes through the context, or takes requests and yields answers."""

    async def serve(requests: Any, context: aio.ServicerContext[Any, Any], _: OpenCall) -> None:
        await inner(requests, context)

    async def generate(requests: Any, context: aio.ServicerContext[Any, Any], _: OpenCall) -> None:
        async for answer in inner(_short(requests, context), context):
            await context.write(answer)

    return generate if inspect.isasyncgenfunction(inner) else serve


async def _short(requests: AsyncIterator[Any], context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
    """The requests of a stream; the first that is too long ends the call."""
    async for request in requests:
        if isinstance(request, TooLong):
            await refuse(context, request.refusal())
        yield request
