"""Taking a state from the members that hold it: what is alike stays, what differs comes from all of them at once."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from paceline._grpc import aio, grpc
from paceline.checkpoint.tag import Tag
from paceline.credentials import Credentials
from paceline.elastic.offer import Content, Description
from paceline.errors import LinkUnavailable, PacelineError
from paceline.links.base import Peer
from paceline.session.wire import CHANNEL_OPTIONS, error_from_status
from pacelinepb.v1 import peer_pb2, session_pb2
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub

__all__ = ["get_manifest", "out_of_reach", "take_state"]

T = TypeVar("T")

_log = logging.getLogger("paceline.elastic")

_BATCH = 16
"""Chunks that are asked of one member at a time: 16 MiB. What it does not give goes to the others."""

_ROOM = 4
"""A state may be so many times as large as this member's own, and some."""

_AT_ONCE = 64
"""Doors that are knocked at at one time."""

_MAX_DESCRIPTION = 64 << 20


async def take_state(
    job: str,
    tag: Tag,
    donors: Sequence[Peer],
    own: Content,
    patience: float,
    credentials: Credentials,
) -> Content:
    """A state that others hold.

    Args:
        job: the job.
        tag: which state.
        donors: who holds it.
        own: what this member holds: chunks that are alike are not asked for. Not changed.
        patience: seconds that a member may be silent.
        credentials: by what members know each other.

    Raises:
        LinkUnavailable: nobody gave it; the text says what each one answered.
    """
    donors = random.sample(donors, len(donors))  # many who come at once shall not all ask the first
    channels = {peer: credentials.member_channel(peer.address, options=CHANNEL_OPTIONS) for peer in donors}
    try:
        failures: list[str] = []
        for peer in donors:
            try:
                described = await _describe(channels[peer], job, tag, peer, own, patience)
            except (aio.AioRpcError, TimeoutError, ValueError, PacelineError) as error:
                failures.append(f"{peer}: {_words(error)}")
                continue
            return await _fetch(job, tag, channels, described, own, patience, failures)
        raise LinkUnavailable(f"nobody gave the state {tag}: " + "; ".join(failures))
    finally:
        await asyncio.gather(*(channel.close(None) for channel in channels.values()))


async def get_manifest(job: str, donor: Peer, patience: float, credentials: Credentials) -> bytes:
    """The manifest of a member; arguments as for `take_state`.

    Raises:
        PacelineError: it did not give it.
    """
    async with credentials.member_channel(donor.address, options=CHANNEL_OPTIONS) as channel:
        request = peer_pb2.GetManifestRequest(job=job, to_member=donor.member_id)
        try:
            answer = await PeerServiceStub(channel).GetManifest(request, timeout=patience, wait_for_ready=True)
        except aio.AioRpcError as error:
            raise error_from_status(error, f"the manifest of {donor}") from error
        return answer.manifest


async def out_of_reach(job: str, members: Sequence[Peer], patience: float, credentials: Credentials) -> list[str]:
    """Which members do not answer at their doors, each with why: who cannot reach all does no good in a view.

    Args:
        job: the job.
        members: whom to ask.
        patience: seconds for each.
        credentials: by what members know each other.
    """
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def knock(member: Peer) -> str | None:
        async with at_once, credentials.member_channel(member.address, options=CHANNEL_OPTIONS) as channel:
            request = peer_pb2.GetManifestRequest(job=job, to_member=member.member_id)
            try:
                await PeerServiceStub(channel).GetManifest(request, timeout=patience, wait_for_ready=True)
            except aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    return f"{member} at {member.address}: {_words(error)}"
            return None

    return [trouble for trouble in await asyncio.gather(*map(knock, members)) if trouble is not None]


async def _describe(channel: aio.Channel, job: str, tag: Tag, peer: Peer, own: Content, patience: float) -> Description:
    request = peer_pb2.DescribeStateRequest(job=job, to_member=peer.member_id, tag=_wire(tag))
    words, hashes = bytearray(), bytearray()
    call = PeerServiceStub(channel).DescribeState(request)
    async with asyncio.timeout(patience) as limit:
        async for piece in call:
            words += piece.json
            hashes += piece.hashes
            if len(words) + len(hashes) > _MAX_DESCRIPTION:
                call.cancel()
                raise ValueError("a description of a state that is longer than any")
            limit.reschedule(asyncio.get_running_loop().time() + patience)
    return Description.from_json(bytes(words), bytes(hashes), _ROOM * own.size + (64 << 20))


async def _fetch(
    job: str,
    tag: Tag,
    channels: dict[Peer, aio.Channel],
    described: Description,
    own: Content,
    patience: float,
    failures: list[str],
) -> Content:
    content = described.allocate(own.arrays)
    missing = await asyncio.to_thread(
        lambda: deque(c for c in range(content.chunks) if content.hash(c) != described.hash(c))
    )
    _log.info(
        "taking %d of %d chunks of the state %s from %d members", len(missing), content.chunks, tag, len(channels)
    )

    giving = dict(channels)

    async def pull(peer: Peer, channel: aio.Channel) -> None:
        while missing:
            share = -(-len(missing) // max(1, len(giving)))
            wanted = [missing.popleft() for _ in range(min(_BATCH, share))]
            try:
                await _pull(channel, job, tag, peer, wanted, content, described, patience)
            except (aio.AioRpcError, TimeoutError, PacelineError) as error:
                failures.append(f"{peer}: {_words(error)}")
                missing.extend(wanted)
                del giving[peer]  # not asked again: what it keeps back, the others would wait for each time
                return

    while missing:
        if not giving:
            raise LinkUnavailable(f"nobody gave the rest of the state {tag}: " + "; ".join(failures))
        await asyncio.gather(*(pull(peer, channel) for peer, channel in giving.items()))
    return content


async def _pull(
    channel: aio.Channel,
    job: str,
    tag: Tag,
    peer: Peer,
    wanted: list[int],
    content: Content,
    described: Description,
    patience: float,
) -> None:
    """Takes chunks from one member; `wanted` keeps those that have not come."""
    request = peer_pb2.GetStateRequest(job=job, to_member=peer.member_id, tag=_wire(tag), chunks=sorted(wanted))
    call = PeerServiceStub(channel).GetState(request)
    try:
        async with asyncio.timeout(patience) as limit:
            async for piece in call:
                if piece.chunk not in wanted:
                    raise PacelineError(f"it sent chunk {piece.chunk}, which was not asked for")
                content.write(piece.chunk, piece.data)
                if content.hash(piece.chunk) != described.hash(piece.chunk):
                    raise PacelineError(f"its chunk {piece.chunk} has other bytes than it should")
                wanted.remove(piece.chunk)
                limit.reschedule(asyncio.get_running_loop().time() + patience)
    finally:
        call.cancel()
    if wanted:
        raise PacelineError(f"it stopped before chunk {wanted[0]}")


def _wire(tag: Tag) -> session_pb2.Tag:
    return session_pb2.Tag(generation=tag.generation, step=tag.step)


def _words(error: Exception) -> str:
    if isinstance(error, aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or "no answer"
