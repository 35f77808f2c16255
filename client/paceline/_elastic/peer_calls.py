"""The calls that a member makes to other members: for their state, for shards of it, and to test the way to them.

A state is fetched from all members that hold it at the same time; chunks that this member already has are not sent. A
call that a member refuses for now is repeated for a while (status UNAVAILABLE with a reason: the member is overloaded,
or the job's secret is just being renewed).
"""

from __future__ import annotations

import asyncio
import logging
import random
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

from paceline._base.rpc import CHANNEL_OPTIONS, aio, call_options, error_from_status, grpc
from paceline._elastic.offer import Content, Description, hash_of
from paceline._elastic.parcel import borrow, unpack
from paceline._elastic.reshard_plan import ElementRun, ReshardPlan, assign, checksum
from paceline._links.base import Peer
from paceline._links.grpc_knock import Knocker, knock
from paceline._links.grpc_state import MAX_PARCEL_BYTES, MAX_RUNS
from paceline._links.shm.segment import Attached, SegmentError
from paceline._session.identity import process_identity
from paceline.credentials import Credentials
from paceline.errors import LimitExceeded, LinkUnavailable, NotAuthenticated, PacelineError
from paceline_protocol import Share, Tag
from pacelinepb.v1 import peer_pb2, session_pb2
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub

_log = logging.getLogger("paceline.elastic")

_BATCH = 16
"""Chunks that are requested from one member at a time: 16 MiB. If it does not send them, others are asked."""

_ROOM = 4
"""Largest size of a state in multiples of this member's own; 64 MiB are added."""

_GIVING = 16
"""Most members that a state is fetched from at a time; more would not make it faster."""

_TESTS_AT_ONCE = 64
"""Members that are tested at a time."""

_MAX_DESCRIPTION = 64 << 20


def _ignore(size: int) -> None:
    """Counts nothing."""


async def take_state(
    job: str,
    tag: Tag,
    donors: Sequence[Peer],
    own: Content,
    patience: float,
    credentials: Credentials,
    *,
    received: Callable[[int], None] = _ignore,
) -> Content:
    """Fetches a state that other members hold.

    `own` is not changed: chunks that are equal are not requested. A member may be silent for `patience` seconds.
    `received` is called with the size in bytes of each piece that has come.

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
                described = await retry_while_refused(describe, patience)
            except (aio.AioRpcError, TimeoutError, ValueError, PacelineError) as error:
                failures.append(f"{peer}: {refusal_text(error)}")
                continue
            return await _fetch(job, tag, {peer: channel}, untried, described, own, patience, failures, received)
        raise LinkUnavailable(f"no member sent the state {tag}: " + "; ".join(failures))


async def get_manifest(job: str, donor: Peer, patience: float, credentials: Credentials) -> bytes:
    """Fetches the manifest of a member."""
    async with credentials.member_channel(donor.address, options=CHANNEL_OPTIONS) as channel:
        request = peer_pb2.GetManifestRequest(job=job, to_member=donor.member_id)
        ask = partial(PeerServiceStub(channel).GetManifest, request, timeout=patience, wait_for_ready=True)
        try:
            answer = await retry_while_refused(ask, patience)
        except aio.AioRpcError as error:
            raise error_from_status(error, f"the manifest of {donor}") from error
        return answer.manifest


async def out_of_reach(
    job: str, members: Sequence[Peer], own: Knocker, patience: float, credentials: Credentials
) -> list[str]:
    """Finds the members that this worker cannot connect to, or that cannot connect to it; a text for each says why.

    A worker that cannot exchange messages with every member would break every view. Each member has `patience` seconds,
    and as many again if it refuses for now.
    """
    at_once = asyncio.Semaphore(_TESTS_AT_ONCE)
    unheard: list[str] = []
    shut_out: list[str] = []

    async def try_one(member: Peer) -> None:
        async with at_once, credentials.member_channel(member.address, options=call_options(patience)) as channel:
            try:
                trouble = await retry_while_refused(
                    partial(knock, channel, job, member.member_id, own, patience), patience
                )
            except aio.AioRpcError as error:  # any other refusal is an answer: the member was reached
                if refuses_for_now(error):
                    unheard.append(f"{member} at {member.address} answers, but refuses for now: {refusal_text(error)}")
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
    most_bytes = _ROOM * own.size + (64 << 20)
    return Description.from_json(bytes(words), bytes(hashes), most_bytes, chunk_bytes=own.chunk_bytes)


async def _fetch(
    job: str,
    tag: Tag,
    giving: dict[Peer, aio.Channel],
    untried: Iterator[tuple[Peer, aio.Channel]],
    described: Description,
    own: Content,
    patience: float,
    failures: list[str],
    received: Callable[[int], None],
) -> Content:
    content, lacking = await asyncio.to_thread(described.allocate, own.arrays)
    missing = deque(lacking)
    _log.info("fetching %d of %d chunks of the state %s", len(missing), content.chunks, tag)

    async def give(peer: Peer, channel: aio.Channel) -> None:
        while missing:
            share = -(-len(missing) // max(1, len(giving)))
            wanted = [missing.popleft() for _ in range(min(_BATCH, share))]
            try:
                pull = partial(_pull, channel, job, tag, peer, wanted, content, described, patience, received)
                await retry_while_refused(pull, patience)
            except (aio.AioRpcError, TimeoutError, PacelineError) as error:
                failures.append(f"{peer}: {refusal_text(error)}")
                missing.extend(wanted)
                del giving[peer]  # not asked again, since each further failure would delay the others
                return

    while missing:  # retries the chunks of members that failed
        giving.update(islice(untried, _GIVING - len(giving)))
        if not giving:
            raise LinkUnavailable(f"no member sent the rest of the state {tag}: " + "; ".join(failures))
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
    received: Callable[[int], None],
) -> None:
    """Fetches chunks from one member; those that have not arrived stay in `wanted`."""
    request = peer_pb2.GetStateRequest(job=job, to_member=peer.member_id, tag=wire_tag(tag), chunks=sorted(wanted))
    call = PeerServiceStub(channel).GetState(request)

    def write(chunk: int, data: bytes) -> None:
        if hash_of(data) != described.hash(chunk):
            raise PacelineError(f"its chunk {chunk} has wrong bytes")
        content.write(chunk, data)

    try:
        async with asyncio.timeout(patience) as limit:
            async for piece in call:
                if piece.chunk not in wanted:
                    raise PacelineError(f"it sent chunk {piece.chunk}, which was not requested")
                received(len(piece.data))
                limit.reschedule(None)  # waits for no member now; an abandoned thread would write on
                await asyncio.to_thread(write, piece.chunk, piece.data)
                wanted.remove(piece.chunk)
                limit.reschedule(asyncio.get_running_loop().time() + patience)
    finally:
        call.cancel()
    if wanted:
        raise PacelineError(f"it stopped before chunk {wanted[0]}")


def wire_tag(tag: Tag) -> session_pb2.Tag:
    """Returns the tag as a protobuf message."""
    return session_pb2.Tag(generation=tag.generation, step=tag.step)


def refusal_text(error: Exception) -> str:
    """Returns the reason that a member gave for refusing a call."""
    if isinstance(error, aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or "no answer"


_PARCELS_AT_ONCE = 2
"""Parcels that one holder packs for one taker at a time: while one is unpacked, the next is packed."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of one call for runs.

    Attributes:
        parcel_bytes: most bytes of the runs together.
        runs: most runs.
        name_bytes: most bytes of their names; the receiver accepts requests of up to 64 KiB.
    """

    parcel_bytes: int = MAX_PARCEL_BYTES
    runs: int = MAX_RUNS
    name_bytes: int = 48 << 10


class Holder(NamedTuple):
    """A member and the shares of a state that it has in full."""

    peer: Peer
    shares: Sequence[Share]


async def take_shards(
    job: str,
    tag: Tag,
    holders: Sequence[Holder],
    plan: ReshardPlan,
    patience: float,
    credentials: Credentials,
    *,
    received: Callable[[int], None] = _ignore,
    limits: RunLimits = RunLimits(),
) -> None:
    """Fetches the runs that a plan still needs, as `take_state` does; the plan needs nothing afterwards.

    Raises:
        LinkUnavailable: no member gave a run; the text says which, and the answer of each.
    """
    taking = _ShardFetcher(job, tag, plan, patience, received, limits)
    holders = random.sample(holders, len(holders))  # spreads the load over replicas
    held = {number: holder.shares for number, holder in enumerate(holders)}
    channels: dict[int, aio.Channel] = {}
    missing = plan.wanted
    try:
        while missing:
            try:
                shares = assign(missing, held, plan.cut)
            except LookupError as error:
                heard = "; ".join(taking.failures) or "none of the members named by the coordinator has it"
                raise LinkUnavailable(f"no member sent {error.args[0]} of the state {tag}: {heard}") from None
            asked = [number for number, runs in shares.items() if runs]
            for number in asked:
                address = holders[number].peer.address
                channels[number] = channels.get(number) or credentials.member_channel(address, options=CHANNEL_OPTIONS)
            left = await asyncio.gather(
                *(taking.from_one(channels[number], holders[number].peer, shares[number]) for number in asked)
            )
            for number, rest in zip(asked, left, strict=True):
                if rest:
                    del held[number]  # not asked again, since each further failure would delay the others
            missing = [run for rest in left for run in rest]
    finally:
        await asyncio.gather(*(channel.close(None) for channel in channels.values()))
    plan.wanted = []


class _ShardFetcher:
    """Fetches one share for one member."""

    def __init__(
        self,
        job: str,
        tag: Tag,
        plan: ReshardPlan,
        patience: float,
        received: Callable[[int], None] = _ignore,
        limits: RunLimits = RunLimits(),
    ) -> None:
        self._received = received
        self._limits = limits
        self.failures: list[str] = []
        self._job = job
        self._tag = tag
        self._plan = plan
        self._patience = patience
        self._process = process_identity()
        self._mapped: set[Attached] = set()

    async def from_one(self, channel: aio.Channel, peer: Peer, runs: Sequence[ElementRun]) -> list[ElementRun]:
        """Fetches runs from one holder; returns those that it did not give."""
        batches = deque(self._batches(runs))
        rest: list[ElementRun] = []

        async def ask() -> None:
            while batches and not rest:
                batch = batches.popleft()
                try:
                    await retry_while_refused(partial(self._get, channel, peer, batch), self._patience)
                except (aio.AioRpcError, TimeoutError, PacelineError) as error:
                    self.failures.append(f"{peer}: {refusal_text(error)}")
                    rest.extend(batch)

        await asyncio.gather(*(ask() for _ in range(_PARCELS_AT_ONCE)))
        return rest + [run for batch in batches for run in batch] if rest else []

    async def _get(self, channel: aio.Channel, peer: Peer, batch: Sequence[ElementRun]) -> None:
        request = peer_pb2.GetRunsRequest(
            job=self._job,
            to_member=peer.member_id,
            tag=wire_tag(self._tag),
            runs=[peer_pb2.ElementRun(array=run.name, start=run.start, count=run.count) for run in batch],
            process=self._process,
        )
        try:
            await self._call(channel, peer, request, batch)
        except (OSError, SegmentError) as error:
            _log.info("cannot map the shared memory of %s, so its parcels are sent over gRPC: %s", peer, error)
            request.ClearField("process")
            await self._call(channel, peer, request, batch)

    async def _call(
        self, channel: aio.Channel, peer: Peer, request: peer_pb2.GetRunsRequest, batch: Sequence[ElementRun]
    ) -> None:
        into = [self._plan.into(run) for run in batch]
        size = sum(array.nbytes for array in into)
        call = PeerServiceStub(channel).GetRuns(request)
        parcel: peer_pb2.Parcel | None = None
        data = bytearray()
        try:
            async with asyncio.timeout(self._patience) as limit:
                async for piece in call:
                    if parcel is None:
                        parcel = piece.parcel
                        if parcel.size != size:
                            raise PacelineError(f"it sent {parcel.size} bytes, but {size} were requested")
                        if parcel.HasField("memory"):
                            memory, start = borrow(parcel.memory, size, peer), parcel.memory.offset
                            self._mapped.add(memory)
                            limit.reschedule(None)  # waits for no member now; an abandoned thread would write on
                            view = memory.view[start : start + size]
                            await asyncio.to_thread(unpack, view, parcel.crc, into, checksum(batch))
                            self._received(size)
                            return
                    data += piece.data
                    if len(data) > size:
                        raise PacelineError(f"it sent more than the {size} bytes that were requested")
                    limit.reschedule(asyncio.get_running_loop().time() + self._patience)
            if parcel is None or len(data) != size:
                raise PacelineError(f"it stopped after {len(data)} of {size} bytes")
            await asyncio.to_thread(unpack, memoryview(data), parcel.crc, into, checksum(batch))
            self._received(size)
        finally:
            call.cancel()

    def _batches(self, runs: Sequence[ElementRun]) -> Iterator[list[ElementRun]]:
        """Cuts runs into batches of the size that one call may request."""
        batch: list[ElementRun] = []
        limits = self._limits
        room, words = limits.parcel_bytes, limits.name_bytes
        for run in runs:
            width = self._plan.into(run).itemsize
            start, rest = run.start, run.count
            while rest:
                name = len(run.name.encode()) + 32  # for the fields around it
                if batch and (room < width or words < name or len(batch) == limits.runs):
                    yield batch
                    batch, room, words = [], limits.parcel_bytes, limits.name_bytes
                count = min(rest, max(room // width, 1))
                batch.append(ElementRun(run.name, start, count))
                start, rest = start + count, rest - count
                room, words = room - count * width, words - name
        if batch:
            yield batch


T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
"""Pauses between two tries: the first, doubled after each try up to the longest."""


async def retry_while_refused(call: Callable[[], Awaitable[T]], patience: float) -> T:
    """Returns the call's result; repeats the call for up to `patience` seconds while the member refuses it for now."""
    loop = asyncio.get_running_loop()
    end, pause = loop.time() + patience, _FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except aio.AioRpcError as error:
            if not refuses_for_now(error) or loop.time() + pause > end:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def refuses_for_now(error: aio.AioRpcError) -> bool:
    """True if a member refused the call because it is overloaded, or has another secret of the job than this worker.

    Each line has a new secret, and not all members learn it at the same moment. For a member that cannot be
    reached, gRPC reports UNAVAILABLE too, but without a reason.
    """
    reason = error_from_status(error, "")
    return error.code() is grpc.StatusCode.UNAVAILABLE and isinstance(reason, LimitExceeded | NotAuthenticated)
