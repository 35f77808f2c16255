"""Fetching a view's members from the coordinator, checked against the hash that came with the view."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable

from google.protobuf.message import DecodeError

from paceline import errors
from paceline._grpc import aio, untyped
from paceline.links.base import Peer
from paceline.session.channel import CoordinatorChannel
from paceline.session.wire import error_from_status, is_transient
from pacelinepb.v1 import session_pb2 as pb

__all__ = ["fetch_peers", "read_peer"]


async def fetch_peers(channel: CoordinatorChannel, job: str, view: pb.ViewFormed, timeout: float) -> list[Peer]:
    """The members in rank order.

    Raises:
        PacelineError: the pages do not hash to what the view says, or do not hold its members; or the coordinator did
            not answer in time.
    """
    pages: list[bytes] = []
    deadline = time.monotonic() + timeout

    def get_page(on: aio.Channel) -> Awaitable[bytes]:
        method = untyped(on.unary_unary)(
            "/pacelinepb.v1.SessionService/GetView", request_serializer=pb.GetViewRequest.SerializeToString
        )  # no deserializer: the hash is over the bytes as they came
        request = pb.GetViewRequest(job=job, generation=view.generation, page=len(pages))
        answer: Awaitable[bytes] = method(request, timeout=max(0.1, deadline - time.monotonic()), wait_for_ready=True)
        return answer

    while len(pages) < view.pages:
        try:
            pages.append(await channel.call(get_page))
        except aio.AioRpcError as error:
            if not is_transient(error) or time.monotonic() >= deadline:
                raise error_from_status(error, f"the members of generation {view.generation}") from error
    peers = _read(pages, view)
    if peers is None:
        raise errors.PacelineError(
            f"the member list of generation {view.generation} is not the one that the coordinator announced"
        )
    return peers


def _read(pages: list[bytes], view: pb.ViewFormed) -> list[Peer] | None:
    """The members on the pages; None if they are not those of the view."""
    if hashlib.sha256(b"".join(pages)).digest() != view.members_sha256:
        return None
    try:
        members = [member for page in pages for member in pb.GetViewResponse.FromString(page).members]
    except DecodeError:
        return None
    if len(members) != view.world_size or any(member.rank != rank for rank, member in enumerate(members)):
        return None
    return [read_peer(member) for member in members]


def read_peer(member: pb.Member) -> Peer:
    """A member as it came over the wire."""
    return Peer(
        member.rank, member.member_id, member.process.host, member.address, member.process.pid, member.process.node
    )
