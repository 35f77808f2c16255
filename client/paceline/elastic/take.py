"""Fetches a state from all members that hold it at once; chunks that this member has already are not sent."""

from __future__ import annotations

import asyncio
import logging
import random
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice

from paceline._grpc import aio, grpc
from paceline._rpc import CHANNEL_OPTIONS, call_options, error_from_status
from paceline.checkpoint.tag import Tag
from paceline.credentials import Credentials
from paceline.elastic.crowd import is_overloaded, retry_while_overloaded
from paceline.elastic.offer import Content, Description
from paceline.errors import LinkUnavailable, PacelineError
from paceline.links.base import Peer
from paceline.links.grpc_knock import Knocker, knock
from pacelinepb.v1 import peer_pb2, session_pb2
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub

__all__ = ["get_manifest", "out_of_reach", "refusal_text", "take_state", "wire_tag"]

_log = logging.getLogger("paceline.elastic")

_BATCH = 16
"""Chunks that are requested from one member at a time: 16 MiB. Others are asked for those that it does not send."""

_ROOM = 4
"""Largest size of a state in multiples of this member's own; 64 MiB are added."""

_GIVING = 16
"""Most members that a state is fetched from at a time; more would not make it faster."""

_AT_ONCE = 64
"""Members that are tested at a time."""

_MAX_DESCRIPTION = 64 << 20


async def take_state(
    job: str,
    tag: Tag,
    donors: Sequence[Peer],
    own: Content,
    patience: float,
    credentials: Credentials,
) -> Content:
    """Fetches a state that other members hold.

    Args:
        job: name of the job.
        tag: tag of the state.
        donors: the members that hold it.
        own: this member's state, which is not changed: chunks that are equal are not requested.
        patience: seconds that a member may be silent.
        credentials: with which members authenticate each other.

    Raises:
        LinkUnavailable: no member gave it; the text has the answer of each.
    """
    async with AsyncExitStack() as channels:

        def dial() -> Iterator[tuple[Peer, aio.Channel]]:
            for peer in random.sample(donors, len(donors)):  # newcomers that start together must not all ask the first
                channel = credentials.member_channel(peer.address, options=CHANNEL_OPTIONS)
                channels.push_async_exit(channel)
                yield peer, channel

        untried = dial()
        failures: list[str] = []
        for peer, channel in untried:
            try:
                describe = partial(_describe, channel, job, tag, peer, own, patience)
                described = await retry_while_overloaded(describe, patience)
            except (aio.AioRpcError, TimeoutError, ValueError, PacelineError) as error:
                failures.append(f"{peer}: {refusal_text(error)}")
                continue
            return await _fetch(job, tag, {peer: channel}, untried, described, own, patience, failures)
        raise LinkUnavailable(f"nobody gave the state {tag}: " + "; ".join(failures))


async def get_manifest(job: str, donor: Peer, patience: float, credentials: Credentials) -> bytes:
    """Fetches the manifest of a member; arguments as for `take_state`.

    Raises:
        PacelineError: the member did not give it.
    """
    async with credentials.member_channel(donor.address, options=CHANNEL_OPTIONS) as channel:
        request = peer_pb2.GetManifestRequest(job=job, to_member=donor.member_id)
        ask = partial(PeerServiceStub(channel).GetManifest, request, timeout=patience, wait_for_ready=True)
        try:
            answer = await retry_while_overloaded(ask, patience)
        except aio.AioRpcError as error:
            raise error_from_status(error, f"the manifest of {donor}") from error
        return answer.manifest


async def out_of_reach(
    job: str, members: Sequence[Peer], own: Knocker, patience: float, credentials: Credentials
) -> list[str]:
    """Finds the members that this worker cannot connect to, or that cannot connect to it; a text for each says why.

    A worker that cannot exchange messages with all members would break every view.

    Args:
        job: name of the job.
        members: the members to test.
        own: this worker and its address, to which each member tries to connect in turn.
        patience: seconds for each member, and again for one that is overloaded.
        credentials: with which members authenticate each other.
    """
    at_once = asyncio.Semaphore(_AT_ONCE)
    unheard: list[str] = []
    shut_out: list[str] = []

    async def try_one(member: Peer) -> None:
        async with at_once, credentials.member_channel(member.address, options=call_options(patience)) as channel:
            try:
                trouble = await retry_while_overloaded(
                    partial(knock, channel, job, member.member_id, own, patience), patience
                )
            except aio.AioRpcError as error:  # any other refusal is an answer: the member was reached
                if is_overloaded(error):
                    unheard.append(f"{member} at {member.address} answers, but is overloaded: {refusal_text(error)}")
                elif error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    unheard.append(f"{member} at {member.address} does not answer: {refusal_text(error)}")
                return
            if trouble:
                there = f"{member} at {member.address} cannot connect to this worker at {own.address}"
                shut_out.append(f"{there}: {trouble}")

    await asyncio.gather(*map(try_one, members))
    advice = ["tell peers another address (--advertise)"] if shut_out else []
    return [*sorted(unheard), *sorted(shut_out), *advice]


async def _describe(channel: aio.Channel, job: str, tag: Tag, peer: Peer, own: Content, patience: float) -> Description:
    request = peer_pb2.DescribeStateRequest(job=job, to_member=peer.member_id, tag=wire_tag(tag))
    words, hashes = bytearray(), bytearray()
    call = PeerServiceStub(channel).DescribeState(request)
    async with asyncio.timeout(patience) as limit:
        async for piece in call:
            if zlib.crc32(piece.hashes, zlib.crc32(piece.json)) != piece.checksum:
                call.cancel()
                raise ValueError("the description of a state has a wrong checksum: it has changed on the way")
            words += piece.json
            hashes += piece.hashes
            if len(words) + len(hashes) > _MAX_DESCRIPTION:
                call.cancel()
                raise ValueError(f"the description of a state is longer than {_MAX_DESCRIPTION} bytes")
            limit.reschedule(asyncio.get_running_loop().time() + patience)
    return Description.from_json(bytes(words), bytes(hashes), _ROOM * own.size + (64 << 20))


async def _fetch(
    job: str,
    tag: Tag,
    giving: dict[Peer, aio.Channel],
    untried: Iterator[tuple[Peer, aio.Channel]],
    described: Description,
    own: Content,
    patience: float,
    failures: list[str],
) -> Content:
    content = described.allocate(own.arrays)
    missing = await asyncio.to_thread(
        lambda: deque(c for c in range(content.chunks) if content.hash(c) != described.hash(c))
    )
    _log.info("taking %d of %d chunks of the state %s", len(missing), content.chunks, tag)

    async def give(peer: Peer, channel: aio.Channel) -> None:
        while missing:
            share = -(-len(missing) // max(1, len(giving)))
            wanted = [missing.popleft() for _ in range(min(_BATCH, share))]
            try:
                pull = partial(_pull, channel, job, tag, peer, wanted, content, described, patience)
                await retry_while_overloaded(pull, patience)
            except (aio.AioRpcError, TimeoutError, PacelineError) as error:
                failures.append(f"{peer}: {refusal_text(error)}")
                missing.extend(wanted)
                del giving[peer]  # not asked again, since each further failure would delay the others
                return

    while missing:  # again for the chunks of members that failed
        giving.update(islice(untried, _GIVING - len(giving)))
        if not giving:
            raise LinkUnavailable(f"nobody gave the rest of the state {tag}: " + "; ".join(failures))
        await asyncio.gather(*(give(peer, channel) for peer, channel in giving.items()))
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
    """Fetches chunks from one member; `wanted` keeps those that have not arrived."""
    request = peer_pb2.GetStateRequest(job=job, to_member=peer.member_id, tag=wire_tag(tag), chunks=sorted(wanted))
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


def wire_tag(tag: Tag) -> session_pb2.Tag:
    """The tag as a protobuf message."""
    return session_pb2.Tag(generation=tag.generation, step=tag.step)


def refusal_text(error: Exception) -> str:
    """The reason that a member gave for refusing a call."""
    if isinstance(error, aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or "no answer"
