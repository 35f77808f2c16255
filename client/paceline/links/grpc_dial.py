"""The dialling side of a link: knock at the peer's door, open the ways out, write what the outbox holds.

Runs on the loop. The stream's answers are watched all the time, so a link that nobody uses still tells of its peer's
death within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from paceline._grpc import EOF, aio, untyped
from paceline.errors import LinkUnavailable
from paceline.links.base import LinkEnded
from paceline.links.halves import Breach
from paceline.links.member_link import MemberLink
from paceline.links.negotiation import WayOut
from paceline.session.address import is_refused, parse_endpoint
from paceline.session.wire import error_from_status, is_transient
from pacelinepb.v1 import peer_pb2

__all__ = ["dial"]

_RETRY = 0.05
"""Seconds between knocks at a door that did not answer."""

_KNOCK = 1.0
"""Seconds for a peer's host to say that nobody listens there."""


_log = logging.getLogger("paceline.links")


async def dial(
    link: MemberLink, channel: aio.Channel, hello: peer_pb2.HelloRequest, way_out: WayOut, patience: float
) -> LinkEnded:
    """Opens the stream, and a faster way out where there is one, and serves the stream until it ends.

    Args:
        link: the link whose outbox is to be written.
        channel: to the peer.
        hello: how to introduce oneself; what it offers is filled in.
        way_out: opens what the peer's door chooses.
        patience: seconds to go on knocking while nothing answers.

    Returns:
        How the link ended.
    """
    try:
        answer = await _open(link, channel, hello, way_out, patience)
    except LinkEnded as error:
        return error
    frames = untyped(channel.stream_stream)(
        "/pacelinepb.v1.PeerService/Frames", response_deserializer=peer_pb2.FramesResponse.FromString
    )
    call = frames(metadata=aio.Metadata(("paceline-ticket-bin", answer.ticket)))
    watcher = asyncio.create_task(_watch(link, call))
    minder = asyncio.create_task(_mind(link, patience))
    try:
        # A write fails once the stream has ended; how it ended is the watcher's to say.
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            while (data := await link.outbox.take()) is not None:
                await call.write(data)
            await call.done_writing()
        done, _ = await asyncio.wait((watcher, minder), return_when=asyncio.FIRST_COMPLETED)
        return (minder if minder in done else watcher).result()
    finally:
        minder.cancel()
        watcher.cancel()
        call.cancel()


async def _open(
    link: MemberLink, channel: aio.Channel, hello: peer_pb2.HelloRequest, way_out: WayOut, patience: float
) -> peer_pb2.HelloResponse:
    """Agrees with the peer's door on how frames travel. What both have but cannot be opened is offered no more."""
    offered = way_out.offers(link.peer)
    hello.tcp_streams = way_out.streams
    while True:
        del hello.offered[:]
        hello.offered.extend(offered)
        answer = await _knock(link, channel, hello, patience)
        if answer.chosen not in offered:
            raise Breach(f"{link.peer} broke the protocol: it chose a kind of link that was not offered")
        if answer.chosen == peer_pb2.LINK_KIND_GRPC:
            link.settle_on(None)
            return answer
        try:
            link.settle_on(await way_out.open(answer, link.peer))
        except LinkUnavailable as error:
            _log.info("trying another kind of link to %s: %s", link.peer, error)
            way_out.give_up(link.peer, answer.chosen)
            offered = [kind for kind in offered if kind != answer.chosen]
        else:
            return answer


async def _knock(
    link: MemberLink, channel: aio.Channel, hello: peer_pb2.HelloRequest, patience: float
) -> peer_pb2.HelloResponse:
    method = channel.unary_unary(
        "/pacelinepb.v1.PeerService/Hello",
        request_serializer=peer_pb2.HelloRequest.SerializeToString,
        response_deserializer=peer_pb2.HelloResponse.FromString,
    )
    start = time.monotonic()
    while True:
        try:
            answer: peer_pb2.HelloResponse = await method(hello, timeout=patience)
            return answer
        except aio.AioRpcError as error:
            waited = time.monotonic() - start
            refused = is_transient(error) and await is_refused(parse_endpoint(link.peer.address), _KNOCK)
            if refused or not is_transient(error) or waited > patience:
                typed = error_from_status(error, f"{link.peer} at {link.peer.address}")
                why = "its address refuses connections" if refused else f"its door stays shut: {typed}"
                raise LinkEnded(f"{link.peer}: {why} (tried {waited:.1f} s)") from error
        await asyncio.sleep(_RETRY)


async def _watch(link: MemberLink, call: aio.StreamStreamCall[bytes, peer_pb2.FramesResponse]) -> LinkEnded:
    ended = await _end_of(link, call)
    link.end_out(ended)  # the writer may be waiting for a frame that nobody will take any more
    return ended


async def _mind(link: MemberLink, patience: float) -> LinkEnded:
    """Finds out a link of which the stream lives, and what carries its frames does not.

    Something between the two hosts has forgotten that connection.
    """
    while (stuck := link.stuck_for(time.monotonic())) <= patience:  # noqa: ASYNC110  the kernel tells nobody
        await asyncio.sleep(patience / 6)
    ended = LinkEnded(
        f"the {link.kind} link to {link.peer} is cut: its host has acknowledged nothing for {stuck:.1f} s"
    )
    link.end_out(ended)
    return ended


async def _end_of(link: MemberLink, call: aio.StreamStreamCall[bytes, peer_pb2.FramesResponse]) -> LinkEnded:
    try:
        while (answer := await call.read()) is not EOF:
            assert isinstance(answer, peer_pb2.FramesResponse)
            if answer.HasField("drained"):
                link.drained.set()
                return LinkEnded(f"{link.peer} left", orderly=True)
    except aio.AioRpcError as error:
        return LinkEnded(f"the link to {link.peer} ended: {error_from_status(error, 'frames')}")
    return LinkEnded(f"the link to {link.peer} ended")
