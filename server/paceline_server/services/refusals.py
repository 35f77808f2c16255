"""Turns refusals into gRPC statuses, in one place for all handlers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from paceline_server._grpc import aio, grpc, rpc_status
from paceline_server.errors import STATUS, NotLeader, Refused
from paceline_server.services.reading import SessionMessages, check_readable, forgiving
from paceline_server.vitals import Vitals
from paceline_server.wire import cut
from pacelinepb import ERROR_DOMAIN
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger(__name__)

OURS = "/pacelinepb."
"""The prefix of our services' methods."""

_MAX_TEXT_BYTES = 1_000
"""The longest text of a refusal, which may repeat the request: grpc allows 8 KB of trailers, which have it twice."""

_Handler = Callable[[Any, "aio.ServicerContext[Any, Any]"], Awaitable[Any]]


class RefusalInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Catches `Refused` from our handlers and ends the call with its status and a `google.rpc.ErrorInfo`.

    Anything else that a handler raises is a bug: it is logged with its stack, and the caller gets only INTERNAL.
    Handlers must be coroutine functions (unary, or streams that read and write through the context).
    """

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wraps the handlers of our services; leaves health and reflection alone."""
        handler = await continuation(handler_call_details)
        # grpc gives None for a method that is not served; its stubs do not say so.
        if not handler or not handler_call_details.method.startswith(OURS):
            return handler
        make: Any = grpc.stream_stream_rpc_method_handler
        inner: Any = _reading_stream(handler.stream_stream)
        if handler.unary_unary is not None:
            make, inner = grpc.unary_unary_rpc_method_handler, _reading(handler.unary_unary)  # type: ignore[arg-type]
        elif handler.unary_stream is not None:
            make, inner = grpc.unary_stream_rpc_method_handler, _reading(handler.unary_stream)  # type: ignore[arg-type]
        parse = handler.request_deserializer
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(
            _refusing(inner, handler_call_details.method, self._vitals),
            forgiving(parse) if parse is not None else None,
            handler.response_serializer,
        )
        return wrapped


def _reading(handler: _Handler) -> _Handler:
    async def handle(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        return await handler(check_readable(request), context)

    return handle


def _reading_stream(handler: Any) -> Any:
    async def handle(requests: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        return await handler(requests, SessionMessages(context))  # the only streams are sessions

    return handle


def _refusing(handler: _Handler, method: str, vitals: Vitals) -> _Handler:
    async def handle(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await handler(request, context)
        except Refused as refused:
            # `AuthenticationInterceptor` keeps what it raises, and the traceback refers to the interceptor's handler.
            await refuse(context, refused.with_traceback(None), vitals)
        except Exception:  # noqa: BLE001 - a bug in one call must not look like a lost connection
            _log.exception("%s failed", method)
            await context.abort(grpc.StatusCode.INTERNAL, "the coordinator failed; its log has more")

    return handle


async def refuse(context: aio.ServicerContext[Any, Any], refused: Refused, vitals: Vitals) -> NoReturn:
    """Ends a call with the status of a refusal and a `google.rpc.ErrorInfo`, and counts it."""
    vitals.refused(refused)
    detail = AnyMessage()
    reason = ErrorReason.Name(refused.reason).removeprefix("ERROR_REASON_")
    info = ErrorInfo(reason=reason, domain=ERROR_DOMAIN)
    if isinstance(refused, NotLeader) and refused.leader:
        info.metadata["leader"] = refused.leader
    detail.Pack(info)
    code = STATUS[type(refused)]
    text = cut(str(refused), _MAX_TEXT_BYTES)
    status = rpc_status.to_status(Status(code=code.value[0], message=text, details=[detail]))
    await context.abort(status.code, status.details, status.trailing_metadata)
