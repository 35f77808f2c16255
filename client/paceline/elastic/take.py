"""Taking a state from the members that hold it: what is alike stays, what differs comes from all of them at once."""

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
from paceline.checkpoint.tag import Tag
from paceline.credentials import Credentials
from paceline.elastic.crowd import is_overloaded, retry_while_overloaded
from paceline.elastic.offer import Content, Description
from paceline.errors import LinkUnavailable, PacelineError
from paceline.links.base import Peer
from paceline.links.grpc_knock import Knocker, knock
from paceline.session.wire import CHANNEL_OPTIONS, call_options, error_from_status
from pacelinepb.v1 import peer_pb2, session_pb2
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub

__all__ = ["get_manifest", "out_of_reach", "refusal_text", "take_state", "wire_tag"]

_log = logging.getLogger("paceline.elastic")

_BATCH = 16
"""Chunks that are asked of one member at a time: 16 MiB. What it does not give goes to the others."""

_ROOM = 4
"""A state may be so many times as large as this member's own, and some."""

_GIVING = 16
"""Members that one state is taken from at one time, however many hold it: more give it no sooner."""

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
    async with AsyncExitStack() as channels:

        def dial() -> Iterator[tuple[Peer, aio.Channel]]:
            for peer in random.sample(donors, len(donors)):  # many who come at once shall not all ask the first
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
    """The manifest of a member; arguments as for `take_state`.

    Raises:
        PacelineError: it did not give it.
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
    """Between which members and this worker there is no way, in either direction, each with why.

    Who cannot reach all, or whom not all reach, does no good in a view.

    Args:
        job: the job.
        members: whom to ask.
        own: who asks, and where its door is, at which all of them knock in turn.
        patience: seconds for each; and for a door that is crowded, to let this worker in.
        credentials: by what members know each other.
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
            except aio.AioRpcError as error:  # any other refusal came from the door: it has been reached
                if is_overloaded(error):
                    unheard.append(f"{member} at {member.address} answers, but has no time: {refusal_text(error)}")
                elif error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    unheard.append(f"{member} at {member.address} does not answer: {refusal_text(error)}")
                return
            if trouble:
                there = f"{member} at {member.address} does not get through to this worker at {own.address}"
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
                raise ValueError("a description of a state has changed on the way: its checksum is wrong")
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
                del giving[peer]  # not asked again: what it keeps back, the others would wait for each time
                return

    while missing:  # again for what those kept back that failed
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
    """Takes chunks from one member; `wanted` keeps those that have not come."""
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
    """As it travels."""
    return session_pb2.Tag(generation=tag.generation, step=tag.step)


def refusal_text(error: Exception) -> str:
    """The reason that a member gave for refusing a call."""
    if isinstance(error, aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or "no answer"
