"""The stream between a member and the coordinator: opened, and the member introduced on it."""

from __future__ import annotations

import asyncio

from paceline._grpc import EOF, aio, untyped
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1 import session_pb2_grpc

__all__ = ["SessionStream", "open_stream"]

SessionStream = aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]

_LEAST_S = 0.1


async def open_stream(
    channel: aio.Channel, first: pb.SessionRequest, metadata: aio.Metadata, timeout: float
) -> tuple[SessionStream, pb.SessionResponse]:
    """Opens a stream and introduces a member; returns what is answered, too.

    Args:
        channel: to the coordinator.
        first: `register` or `resume`.
        metadata: the caller's token.
        timeout: seconds, for a coordinator that does not answer; a tenth of a second at least.

    Raises:
        TimeoutError: it does not.
        AioRpcError: it refused, or is not there.
    """
    stream: SessionStream = untyped(session_pb2_grpc.SessionServiceStub(channel).Session)(metadata=metadata)
    try:
        async with asyncio.timeout(max(_LEAST_S, timeout)):
            await stream.write(first)
            answer: object = await stream.read()
    except TimeoutError:
        stream.cancel()
        raise
    except asyncio.InvalidStateError:  # refused before the write: the status says why
        answer = EOF
    if not isinstance(answer, pb.SessionResponse):
        raise await _status(stream)
    return stream, answer


async def _status(stream: SessionStream) -> aio.AioRpcError:
    """The status of a stream that ended without an answer, as the exception that grpc would raise."""
    leading, trailing = await stream.initial_metadata(), await stream.trailing_metadata()
    return aio.AioRpcError(await stream.code(), leading, trailing, await stream.details(), None)
