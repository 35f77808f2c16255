"""The methods of a worker's door that describe a member's training state and send it, chunk by chunk."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any, NoReturn, Protocol

from paceline._base.rpc import grpc
from paceline._links.grpc_methods import Requests, refuse, shown
from paceline.errors import PacelineError
from paceline_protocol import Tag
from pacelinepb.bounds import MOST
from pacelinepb.v1 import peer_pb2, session_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason

_PIECE_BYTES = 1 << 20
"""Bytes of a description, or of a parcel, in one message."""

MAX_RUNS = MOST["GetRunsRequest.runs"]
"""Runs that one call may ask for."""

MAX_PARCEL_BYTES = 32 << 20
"""Bytes that the runs of one call may have together."""

_PARCELS = 8
"""Parcels that are sent at one time; other callers wait."""

_LENT_SECONDS = 10.0
"""Seconds for which a parcel's memory is lent; the caller copies the parcel out of it in that time."""


class ServedParcel(Protocol):
    """Copies of some runs of a state."""

    crc: int
    """CRC-32 of the bytes."""
    data: memoryview

    def lend(self, process: session_pb2.ProcessIdentity) -> peer_pb2.LentMemory | None:
        """Returns where that process finds the bytes; None if it cannot map them."""


class StateDescription(Protocol):
    """The description of a training state."""

    hashes: bytes

    def to_json(self) -> bytes:
        """Returns everything except the hashes."""


class StateSource(Protocol):
    """The object that holds the state. Its methods are called from any thread."""

    manifest: bytes
    """The manifest; empty while there is none."""

    def describe(self, tag: Tag) -> StateDescription:
        """Describes a state. May take time. Raises PacelineError if that state is not held."""

    def read(self, tag: Tag, chunk: int) -> bytes:
        """Returns a chunk. Raises PacelineError if that state is not held any more."""

    def pack(self, tag: Tag, runs: Sequence[tuple[str, int, int]], most_bytes: int) -> ServedParcel:
        """Copies runs, each given by name, first element and count. May take time.

        Raises PacelineError if the state or one of the runs is not held, or if the runs exceed `most_bytes` together.
        """


class StateWindow:
    """The handlers of DescribeState, GetState, GetRuns and GetManifest for the members of a job.

    `source` holds the state that is served, if there is one. `member_id` is "" until this worker is registered.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self.member_id = ""
        self.source: StateSource | None = None
        self._parcels = asyncio.Semaphore(_PARCELS)

    def handlers(self, requests: Requests) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Returns the handlers by the names of the methods."""
        return {
            "DescribeState": requests.streaming_method(
                peer_pb2.DescribeStateRequest, peer_pb2.DescribeStateResponse, self._describe
            ),
            "GetState": requests.streaming_method(peer_pb2.GetStateRequest, peer_pb2.GetStateResponse, self._get),
            "GetRuns": requests.streaming_method(peer_pb2.GetRunsRequest, peer_pb2.GetRunsResponse, self._get_runs),
            "GetManifest": requests.unary_method(
                peer_pb2.GetManifestRequest, peer_pb2.GetManifestResponse, self._manifest
            ),
        }

    async def _describe(
        self, request: peer_pb2.DescribeStateRequest, context: Any
    ) -> AsyncIterator[peer_pb2.DescribeStateResponse]:
        source = await self._check(request.job, request.to_member, context)
        try:
            known = await asyncio.to_thread(source.describe, Tag(request.tag.generation, request.tag.step))
        except PacelineError as error:
            await _gone(context, error)
        words, hashes = known.to_json(), known.hashes
        for start in range(0, max(len(words), len(hashes), 1), _PIECE_BYTES):
            stop = start + _PIECE_BYTES
            piece = peer_pb2.DescribeStateResponse(json=words[start:stop], hashes=hashes[start:stop])
            piece.checksum = zlib.crc32(piece.hashes, zlib.crc32(piece.json))
            yield piece

    async def _get(self, request: peer_pb2.GetStateRequest, context: Any) -> AsyncIterator[peer_pb2.GetStateResponse]:
        source = await self._check(request.job, request.to_member, context)
        if any(chunk >= after for chunk, after in pairwise(request.chunks)):  # or a few bytes would read a whole state
            text = "the numbers of chunks must ascend"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        tag = Tag(request.tag.generation, request.tag.step)
        for chunk in request.chunks:
            try:
                data = await asyncio.to_thread(source.read, tag, chunk)
            except PacelineError as error:
                await _gone(context, error)
            yield peer_pb2.GetStateResponse(chunk=chunk, data=data)

    async def _get_runs(
        self, request: peer_pb2.GetRunsRequest, context: Any
    ) -> AsyncIterator[peer_pb2.GetRunsResponse]:
        source = await self._check(request.job, request.to_member, context)
        tag = Tag(request.tag.generation, request.tag.step)
        runs = [(run.array, run.start, run.count) for run in request.runs]
        async with self._parcels:
            try:
                parcel = await asyncio.to_thread(source.pack, tag, runs, MAX_PARCEL_BYTES)
            except PacelineError as error:
                await _gone(context, error)
            told = peer_pb2.Parcel(size=len(parcel.data), crc=parcel.crc)
            lent = parcel.lend(request.process) if request.HasField("process") else None
            if lent is not None:
                told.memory.CopyFrom(lent)
            yield peer_pb2.GetRunsResponse(parcel=told)
            if lent is not None:
                await asyncio.sleep(_LENT_SECONDS)  # cancelled when the caller has read the parcel and ends the call
                return
            for start in range(0, len(parcel.data), _PIECE_BYTES):
                yield peer_pb2.GetRunsResponse(data=bytes(parcel.data[start : start + _PIECE_BYTES]))

    async def _manifest(self, request: peer_pb2.GetManifestRequest, context: Any) -> peer_pb2.GetManifestResponse:
        source = await self._check(request.job, request.to_member, context)
        return peer_pb2.GetManifestResponse(manifest=source.manifest)

    async def _check(self, job: str, to_member: str, context: Any) -> StateSource:
        if job != self._job or to_member != self.member_id or not to_member:
            text = f"this is not member {shown(to_member)} of job {shown(job)}"  # do not reveal ours to strangers
            await refuse(context, grpc.StatusCode.NOT_FOUND, ErrorReason.ERROR_REASON_NOT_FOUND, text)
        if self.source is None:
            await _gone(context, PacelineError("this member has no state yet"))
        return self.source


async def _gone(context: Any, error: PacelineError) -> NoReturn:
    reason = ErrorReason.ERROR_REASON_STALE_GENERATION
    await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, reason, str(error))
