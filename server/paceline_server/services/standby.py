"""The services of a coordinator that does not lead: each call is refused, with the address of the leader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message_factory import GetMessageClass

from paceline_server._grpc import aio, grpc
from paceline_server.errors import NotLeader
from pacelinepb.v1 import admin_pb2, session_pb2, store_pb2

_SESSION = "Session"
"""The one method of which both sides are streams; all other requests reach handlers as one message."""


class StandbyHandlers:
    """Handlers of all our services."""

    def __init__(self, refusal: Callable[[], NotLeader]) -> None:
        self._refusal = refusal

    def add_to(self, server: aio.Server) -> None:
        """Registers the handlers."""
        for descriptor in (session_pb2.DESCRIPTOR, store_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR):
            for service in descriptor.services_by_name.values():
                handlers = {method.name: self._handler(method) for method in service.methods}
                server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))

    def _handler(self, method: Any) -> grpc.RpcMethodHandler[Any, Any]:
        async def refuse(request: Any, context: Any) -> Any:
            raise self._refusal()

        if method.name == _SESSION:
            return grpc.stream_stream_rpc_method_handler(refuse, _as_it_is, _as_it_is)
        make: Any = grpc.unary_unary_rpc_method_handler
        if method.server_streaming:
            make = grpc.unary_stream_rpc_method_handler
        read = GetMessageClass(method.input_type).FromString
        handler: grpc.RpcMethodHandler[Any, Any] = make(
            refuse, read, GetMessageClass(method.output_type).SerializeToString
        )
        return handler


def _as_it_is(data: bytes) -> bytes:
    return data
