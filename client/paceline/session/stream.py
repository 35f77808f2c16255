"""The stream between a member and the coordinator: opened, and the member introduced on it."""

from __future__ import annotations

import asyncio

from google.protobuf.message import DecodeError

from paceline._grpc import aio, grpc, untyped
from pacelinepb import checks
from pacelinepb.v1 import session_pb2 as pb

__all__ = ["SessionStream", "open_stream"]

_LEAST_S = 0.1


class SessionStream:
    """The messages of a session's stream, each way with its check.

    Args:
        channel: to the coordinator.
        metadata: the caller's token.
    """

    def __init__(self, channel: aio.Channel, metadata: aio.Metadata) -> None:
        # Without serialisers: bytes go through, for the check is over what was sent.
        method = untyped(channel.stream_stream)("/pacelinepb.v1.SessionService/Session")
        self._call: aio.StreamStreamCall[bytes, bytes] = method(metadata=metadata)
        self._read = self._written = 0

    async def write(self, request: pb.SessionRequest) -> None:
        """Sends a message; for one task at a time.

        Raises:
            AioRpcError, asyncio.InvalidStateError: the stream has ended.
        """
        data = checks.with_check(request.SerializeToString(), self._written)
        self._written += 1
        await self._call.write(data)

    async def read(self) -> pb.SessionResponse | None:
        """The next message; None at the end of the stream.

        Raises:
            AioRpcError: the stream was refused or broke; DATA_LOSS, which no coordinator needs to say: the message has
                changed on the way.
        """
        data: object = await self._call.read()
        if not isinstance(data, bytes):
            return None
        if not checks.is_sound(data, self._read):
            raise _damaged("a message of the coordinator has changed, or was lost, on the way")
        self._read += 1
        try:
            return pb.SessionResponse.FromString(data)
        except DecodeError:
            raise _damaged("what the coordinator said is no message of a session") from None

    def cancel(self) -> None:
        """Ends the stream."""
        self._call.cancel()

    async def status(self) -> aio.AioRpcError:
        """The status of a stream that ended without an answer, as the exception that grpc would raise."""
        call = self._call
        leading, trailing = await call.initial_metadata(), await call.trailing_metadata()
        return aio.AioRpcError(await call.code(), leading, trailing, await call.details(), None)


def _damaged(text: str) -> aio.AioRpcError:
    return aio.AioRpcError(grpc.StatusCode.DATA_LOSS, aio.Metadata(), aio.Metadata(), text, None)


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
        AioRpcError: it refused, or is not there, or its answer makes no sense.
    """
    stream = SessionStream(channel, metadata)
    answer = None
    try:
        async with asyncio.timeout(max(_LEAST_S, timeout)):
            await stream.write(first)
            answer = await stream.read()
    except asyncio.InvalidStateError:
        pass  # refused before the write: the status says why
    except (TimeoutError, aio.AioRpcError):
        stream.cancel()
        raise
    if answer is None:
        raise await stream.status()
    return stream, answer
