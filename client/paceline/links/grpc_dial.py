"""The dialling half of a gRPC link: knock at the peer's door, open the stream, write what the outbox holds.

Runs on the loop. The stream's answers are watched all the time, so a link that nobody uses still tells of its peer's
death within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from paceline._grpc import EOF, aio, untyped
from paceline.links.base import LinkEnded
from paceline.links.grpc_link import GrpcLink
from paceline.session.address import is_refused, parse_endpoint
from paceline.session.wire import error_from_status, is_transient
from pacelinepb.v1 import peer_pb2

__all__ = ["dial"]

_RETRY = 0.05
"""Seconds between knocks at a door that did not answer."""

_KNOCK = 1.0
"""Seconds for a peer's host to say that nobody listens there."""


async def dial(link: GrpcLink, channel: aio.Channel, hello: peer_pb2.HelloRequest, patience: float) -> LinkEnded:
    """Opens the stream and serves it until it ends.

    Args:
        link: the link whose outbox is to be written.
        channel: to the peer.
        hello: how to introduce oneself.
        patience: seconds to go on knocking while nothing answers.

    Returns:
        How the link ended.
    """
    try:
        ticket = await _knock(link, channel, hello, patience)
    except LinkEnded as error:
        return error
    frames = untyped(channel.stream_stream)(
        "/pacelinepb.v1.PeerService/Frames", response_deserializer=peer_pb2.FramesResponse.FromString
    )
    call = frames(metadata=aio.Metadata(("paceline-ticket-bin", ticket)))
    watcher = asyncio.create_task(_watch(link, call))
    try:
        # A write fails once the stream has ended; how it ended is the watcher's to say.
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            while (data := await link.outbox.take()) is not None:
                await call.write(data)
            await call.done_writing()
        return await watcher
    finally:
        watcher.cancel()
        call.cancel()


async def _knock(link: GrpcLink, channel: aio.Channel, hello: peer_pb2.HelloRequest, patience: float) -> bytes:
    method = channel.unary_unary(
        "/pacelinepb.v1.PeerService/Hello",
        request_serializer=peer_pb2.HelloRequest.SerializeToString,
        response_deserializer=peer_pb2.HelloResponse.FromString,
    )
    start = time.monotonic()
    while True:
        try:
            answer = await method(hello, timeout=patience)
            return bytes(answer.ticket)
        except aio.AioRpcError as error:
            waited = time.monotonic() - start
            refused = is_transient(error) and await is_refused(parse_endpoint(link.peer.address), _KNOCK)
            if refused or not is_transient(error) or waited > patience:
                typed = error_from_status(error, f"{link.peer} at {link.peer.address}")
                why = "its address refuses connections" if refused else f"its door stays shut: {typed}"
                raise LinkEnded(f"{link.peer}: {why} (tried {waited:.1f} s)") from error
        await asyncio.sleep(_RETRY)


async def _watch(link: GrpcLink, call: aio.StreamStreamCall[bytes, peer_pb2.FramesResponse]) -> LinkEnded:
    ended = await _end_of(link, call)
    link.outbox.end(ended)  # the writer may be waiting for a frame that nobody will take any more
    return ended


async def _end_of(link: GrpcLink, call: aio.StreamStreamCall[bytes, peer_pb2.FramesResponse]) -> LinkEnded:
    try:
        while (answer := await call.read()) is not EOF:
            assert isinstance(answer, peer_pb2.FramesResponse)
            if answer.HasField("drained"):
                link.drained.set()
                return LinkEnded(f"{link.peer} left", orderly=True)
    except aio.AioRpcError as error:
        return LinkEnded(f"the link to {link.peer} ended: {error_from_status(error, 'frames')}")
    return LinkEnded(f"the link to {link.peer} ended")
