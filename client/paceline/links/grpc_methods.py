"""Methods of a worker's front door whose requests are parsed by us: what cannot be read is refused by name.

grpc itself would end such a call with UNKNOWN and the words of a Python exception.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from paceline._grpc import grpc
from paceline.links.grpc_refusal import refuse
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["streaming_method", "unary_method"]

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


def unary_method(
    request: type[Q], response: type[R], handler: Callable[[Q, Any], Awaitable[R]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """A method with one answer."""

    async def handle(data: bytes, context: Any) -> R:
        return await handler(await _parsed(request, data, context), context)

    made: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
        handle, response_serializer=response.SerializeToString
    )
    return made


def streaming_method(
    request: type[Q], response: type[R], handler: Callable[[Q, Any], AsyncIterator[R]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """A method with a stream of answers."""

    async def handle(data: bytes, context: Any) -> AsyncIterator[R]:
        async for answer in handler(await _parsed(request, data, context), context):
            yield answer

    made: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
        handle, response_serializer=response.SerializeToString
    )
    return made


async def _parsed(request: type[Q], data: bytes, context: Any) -> Q:
    try:
        return request.FromString(data)
    except DecodeError:
        text = f"the bytes of the request are no {request.DESCRIPTOR.name}"
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
