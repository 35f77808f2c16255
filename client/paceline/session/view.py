"""Fetching a view's members from the coordinator, checked against the hash that came with the view."""

from __future__ import annotations

import hashlib

from paceline import errors
from paceline._grpc import aio, untyped
from paceline.links.base import Peer
from pacelinepb.v1 import session_pb2 as pb

__all__ = ["fetch_peers"]


async def fetch_peers(channel: aio.Channel, job: str, view: pb.ViewFormed, timeout: float) -> list[Peer]:
    """The members in rank order.

    Raises:
        PacelineError: the pages do not hash to what the view says, or do not hold its members.
        grpc.aio.AioRpcError: a call failed.
    """
    get_page = untyped(channel.unary_unary)(
        "/pacelinepb.v1.SessionService/GetView", request_serializer=pb.GetViewRequest.SerializeToString
    )  # no deserializer: the hash is over the bytes as they came
    digest = hashlib.sha256()
    members: list[pb.Member] = []
    for page in range(view.pages):
        request = pb.GetViewRequest(job=job, generation=view.generation, page=page)
        data = await get_page(request, timeout=timeout)
        digest.update(data)
        members.extend(pb.GetViewResponse.FromString(data).members)
    if digest.digest() != view.members_sha256 or [m.rank for m in members] != list(range(view.world_size)):
        raise errors.PacelineError(
            f"the member list of generation {view.generation} is not the one that the coordinator announced"
        )
    return [
        Peer(member.rank, member.member_id, member.process.host, member.address, member.process.pid)
        for member in members
    ]
