"""How a worker's front door refuses a call: a status with Paceline's own reason in it."""

from __future__ import annotations

from typing import Any, NoReturn

from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from paceline._grpc import grpc
from pacelinepb import ERROR_DOMAIN
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["refuse", "shown"]

MAX_TEXT_BYTES = 1000
"""Of a refusal. It travels twice in the trailers, once with up to 3 bytes for each, and grpc takes 8 KiB of them: with
more, the caller would get a status of grpc's own and no reason."""

MAX_SHOWN = 80
"""Characters of what a caller sent that he hears again."""


async def refuse(context: Any, code: grpc.StatusCode, reason: ErrorReason.ValueType, text: str) -> NoReturn:
    """Ends the call with a `google.rpc.ErrorInfo` that a caller can tell the kind of refusal by."""
    info = error_details_pb2.ErrorInfo(
        domain=ERROR_DOMAIN, reason=ErrorReason.Name(reason).removeprefix("ERROR_REASON_")
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    message = text.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status always raises")


def shown(text: str) -> str:
    """What a caller sent, fit to be repeated: printable and short."""
    return repr(text[:MAX_SHOWN])[:MAX_SHOWN]
