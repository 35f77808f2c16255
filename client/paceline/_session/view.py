"""Fetches a view's members from the coordinator, and checks them against the hash that came with the view."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Sequence

from google.protobuf.message import DecodeError

from paceline import errors
from paceline._base.rpc import aio, backoff, error_from_status, grpc, is_transient, untyped
from paceline._links.base import Peer
from paceline._session.connection import CoordinatorChannel
from paceline_protocol import View
from paceline_protocol.messages import MemberList
from paceline_protocol.translation import read_member
from pacelinepb.v1 import session_pb2 as pb

_BELIEVED = 3
"""Refusals in a row after which a refusal is final: a byte of the request may have changed on the way."""


_ATTEMPT_S = 2.0
"""Seconds for the first attempt; each later one has twice as long. grpc's server does not answer at all if the name of
the method has changed on the way and is no longer valid UTF-8."""


class MemberLists:
    """Fetches the member lists of one session. Of a later view it fetches only the changes since the last list.

    `position` is this worker's in its replica: the lists have the ranks with the same one.
    """

    def __init__(self, position: int = 0) -> None:
        self._position = position
        self._known: list[pb.Member] = []
        self._known_sha256 = b""

    async def fetch(
        self, channel: CoordinatorChannel, job: str, announced: MemberList | View, timeout: float
    ) -> list[Peer]:
        """Returns the members in rank order. Fetches damaged pages again, and a list that is known not at all."""
        assert isinstance(announced, MemberList), "a member is told of a list, not of a view"
        # The coordinator tells a candidate of the running view again whenever one of its members ends.
        if self._known and announced.sha256 == self._known_sha256:
            return [_read_peer(member) for member in self._known]
        deadline = time.monotonic() + timeout
        known, known_sha256 = self._known, self._known_sha256
        refused = 0
        attempt = 0
        while True:
            try:
                until = min(deadline, time.monotonic() + _ATTEMPT_S * 2.0**attempt)
                pages = await _fetch_pages(channel, job, announced, until, known_sha256, self._position)
                members = _changed(known, pages[0], announced) if _has_changes(pages) else _read(pages, announced)
            except aio.AioRpcError as error:
                refused += not is_transient(error) and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
                if refused >= _BELIEVED or time.monotonic() >= deadline:
                    raise error_from_status(error, f"the members of generation {announced.generation}") from error
            else:
                if members is not None:
                    self._known, self._known_sha256 = members, announced.sha256
                    return [_read_peer(member) for member in members]
                if time.monotonic() >= deadline:
                    raise errors.PacelineError(
                        f"the member list of generation {announced.generation} is not the one that was announced"
                    )
                known_sha256 = b""  # fetches the whole list next
            await asyncio.sleep(backoff(attempt))
            attempt += 1


async def _fetch_pages(
    channel: CoordinatorChannel,
    job: str,
    announced: MemberList,
    deadline: float,
    known_sha256: bytes,
    position: int,
) -> list[bytes]:
    """Returns all pages, or one with the changes since the list that is known."""
    pages: list[bytes] = []

    def get_page(on: aio.Channel) -> Awaitable[bytes]:
        method = untyped(on.unary_unary)(
            "/pacelinepb.v1.SessionService/GetView", request_serializer=pb.GetViewRequest.SerializeToString
        )  # no deserializer: the hash covers the bytes as they arrived
        request = pb.GetViewRequest(job=job, generation=announced.generation, page=len(pages), position=position)
        if not pages:
            request.known_sha256 = known_sha256
        answer: Awaitable[bytes] = method(request, timeout=max(0.1, deadline - time.monotonic()), wait_for_ready=True)
        return answer

    while len(pages) < announced.pages and not _has_changes(pages):
        pages.append(await channel.call(get_page))
    return pages


def _has_changes(pages: Sequence[bytes]) -> bool:
    try:
        return len(pages) == 1 and bool(pb.GetViewResponse.FromString(pages[0]).stretches)
    except DecodeError:
        return False


def _changed(known: Sequence[pb.Member], page: bytes, announced: MemberList) -> list[pb.Member] | None:
    """Applies a page of changes to the known members; returns None if the result does not match the view."""
    members: list[pb.Member] = []
    for stretch in pb.GetViewResponse.FromString(page).stretches:
        if stretch.first + stretch.count > len(known):
            return None
        for old in known[stretch.first : stretch.first + stretch.count]:
            member = pb.Member()
            member.CopyFrom(old)
            members.append(member)
        members += stretch.members
        if len(members) > announced.world_size:
            return None
    for rank, member in enumerate(members):
        member.rank = rank
    return _read([pb.GetViewResponse(members=members).SerializeToString(deterministic=True)], announced)


def _read(pages: list[bytes], announced: MemberList) -> list[pb.Member] | None:
    """Returns the members on the pages; None if they do not match."""
    if hashlib.sha256(b"".join(pages)).digest() != announced.sha256:
        return None
    try:
        members = [member for page in pages for member in pb.GetViewResponse.FromString(page).members]
    except DecodeError:
        return None
    if len(members) != announced.world_size or any(member.rank != rank for rank, member in enumerate(members)):
        return None
    return members


def _read_peer(member: pb.Member) -> Peer:
    """Converts a member from its protobuf message."""
    return Peer.of(read_member(member))
