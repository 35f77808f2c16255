"""Fetches a new share of a sharded state from all members that hold parts of it, at the same time."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from paceline._grpc import aio
from paceline._rpc import CHANNEL_OPTIONS
from paceline.checkpoint.tag import Tag
from paceline.credentials import Credentials
from paceline.elastic.crowd import retry_while_overloaded
from paceline.elastic.parcel import borrow, unpack
from paceline.elastic.resharding import Resharding
from paceline.elastic.runs import Run, assign, checksum
from paceline.elastic.share import Share
from paceline.elastic.take import refusal_text, wire_tag
from paceline.errors import LinkUnavailable, PacelineError
from paceline.links.base import Peer
from paceline.links.grpc_state import MAX_PARCEL_BYTES, MAX_RUNS
from paceline.links.shm.segment import Attached, SegmentError
from paceline.session.identity import process_identity
from pacelinepb.v1 import peer_pb2
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub

__all__ = ["Holder", "take_shards"]

_log = logging.getLogger("paceline.elastic")

_AT_ONCE = 2
"""Parcels that one holder packs for one taker at a time: while one is unpacked, the next is packed."""

_MAX_REQUEST = 48 << 10
"""Bytes of names in one request; the receiver reads requests of up to 64 KiB."""


class Holder(NamedTuple):
    """A member and the shares of a state that it holds.

    Attributes:
        peer: the member.
        shares: the shares that it has in full.
    """

    peer: Peer
    shares: Sequence[Share]


async def take_shards(
    job: str, tag: Tag, holders: Sequence[Holder], plan: Resharding, patience: float, credentials: Credentials
) -> None:
    """Fetches the runs that a plan still needs.

    Args:
        job: name of the job.
        tag: tag of the state.
        holders: the members that hold shares of it.
        plan: the plan to fill; it needs nothing afterwards.
        patience: seconds that a holder may be silent.
        credentials: with which members authenticate each other.

    Raises:
        LinkUnavailable: no member gave a run; the text says which, and the answer of each.
    """
    taking = _ShardFetcher(job, tag, plan, patience)
    holders = random.sample(holders, len(holders))  # spreads the load over replicas
    held = {number: holder.shares for number, holder in enumerate(holders)}
    channels: dict[int, aio.Channel] = {}
    missing = plan.wanted
    try:
        while missing:
            try:
                shares = assign(missing, held, plan.cut)
            except LookupError as error:
                heard = "; ".join(taking.failures) or "none of the members that were named has it"
                raise LinkUnavailable(f"nobody gave {error.args[0]} of the state {tag}: {heard}") from None
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

    def __init__(self, job: str, tag: Tag, plan: Resharding, patience: float) -> None:
        self.failures: list[str] = []
        self._job = job
        self._tag = tag
        self._plan = plan
        self._patience = patience
        self._process = process_identity()
        self._mapped: set[Attached] = set()

    async def from_one(self, channel: aio.Channel, peer: Peer, runs: Sequence[Run]) -> list[Run]:
        """Fetches runs from one holder; returns those that it did not give."""
        batches = deque(self._batches(runs))
        rest: list[Run] = []

        async def ask() -> None:
            while batches and not rest:
                batch = batches.popleft()
                try:
                    await retry_while_overloaded(partial(self._get, channel, peer, batch), self._patience)
                except (aio.AioRpcError, TimeoutError, PacelineError) as error:
                    self.failures.append(f"{peer}: {refusal_text(error)}")
                    rest.extend(batch)

        await asyncio.gather(*(ask() for _ in range(_AT_ONCE)))
        return rest + [run for batch in batches for run in batch] if rest else []

    async def _get(self, channel: aio.Channel, peer: Peer, batch: Sequence[Run]) -> None:
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
            _log.info("the shared memory of %s cannot be mapped here, its parcels are sent over gRPC: %s", peer, error)
            request.ClearField("process")
            await self._call(channel, peer, request, batch)

    async def _call(
        self, channel: aio.Channel, peer: Peer, request: peer_pb2.GetRunsRequest, batch: Sequence[Run]
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
                            raise PacelineError(f"it sent {parcel.size} bytes where {size} were asked for")
                        if parcel.HasField("memory"):
                            memory, start = borrow(parcel.memory, size, peer), parcel.memory.offset
                            self._mapped.add(memory)
                            limit.reschedule(None)  # no member is waited for; an abandoned thread would write on
                            view = memory.view[start : start + size]
                            await asyncio.to_thread(unpack, view, parcel.crc, into, checksum(batch))
                            return
                    data += piece.data
                    if len(data) > size:
                        raise PacelineError(f"it sent more than the {size} bytes that were asked for")
                    limit.reschedule(asyncio.get_running_loop().time() + self._patience)
            if parcel is None or len(data) != size:
                raise PacelineError(f"it stopped after {len(data)} of {size} bytes")
            await asyncio.to_thread(unpack, memoryview(data), parcel.crc, into, checksum(batch))
        finally:
            call.cancel()

    def _batches(self, runs: Sequence[Run]) -> Iterator[list[Run]]:
        """Cuts runs into batches of the size that one call may request."""
        batch: list[Run] = []
        room, words = MAX_PARCEL_BYTES, _MAX_REQUEST
        for run in runs:
            width = self._plan.into(run).itemsize
            start, rest = run.start, run.count
            while rest:
                name = len(run.name.encode()) + 32  # of the fields around it
                if batch and (room < width or words < name or len(batch) == MAX_RUNS):
                    yield batch
                    batch, room, words = [], MAX_PARCEL_BYTES, _MAX_REQUEST
                count = min(rest, max(room // width, 1))
                batch.append(Run(run.name, start, count))
                start, rest = start + count, rest - count
                room, words = room - count * width, words - name
        if batch:
            yield batch
