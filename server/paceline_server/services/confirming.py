"""Lets an answer leave only once it is certain that this coordinator led while it made the answer.

A coordinator that was deposed and does not know it yet would answer with what was true before, or accept what nobody
stores. A refusal is an answer, too: a worker that hears often enough that its session has ended gives up. With a state
of its own a coordinator is always sure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from paceline_server._grpc import aio, grpc
from paceline_server.errors import PermissionDenied, Refused, Unauthenticated
from paceline_server.services.refusals import OURS
from paceline_server.storage.base import Storage


class ConfirmingInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Confirms each refusal, and each answer to a call that has one. Messages of sessions carry an epoch instead.

    A refusal of the caller's token rests on no state, so it is not confirmed: callers without a token must not make the
    leader write.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wraps the handlers of our services."""
        handler = await continuation(handler_call_details)
        if not handler or not handler_call_details.method.startswith(OURS):
            return handler
        make: Any = grpc.stream_stream_rpc_method_handler
        inner: Any = handler.stream_stream
        if handler.unary_unary is not None:
            make, inner = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        elif handler.unary_stream is not None:
            make, inner = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        is_one = handler.unary_unary is not None

        async def answer(request: Any, context: Any) -> Any:
            try:
                answered = await inner(request, context)
            except (Unauthenticated, PermissionDenied):
                raise
            except Refused:
                await self._storage.confirm()
                raise
            if is_one:
                await self._storage.confirm()
            return answered

        wrapped: grpc.RpcMethodHandler[Any, Any] = make(
            answer, handler.request_deserializer, handler.response_serializer
        )
        return wrapped
