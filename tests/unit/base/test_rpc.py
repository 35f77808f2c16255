"""Which failed calls may be tried again, and answers that are none."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline import errors
from paceline._base.rpc import aio, grpc, is_transient
from paceline._session.view import MemberLists
from paceline_protocol.messages import MemberList
from pacelinepb.v1 import session_pb2 as pb


@pytest.mark.parametrize(
    ("code", "transient"),
    [
        (grpc.StatusCode.UNAVAILABLE, True),
        (grpc.StatusCode.CANCELLED, True),
        (grpc.StatusCode.UNKNOWN, True),  # "Stream removed": a SIGKILLed coordinator's connection, now and then
        (grpc.StatusCode.INTERNAL, True),  # the same, where a write finds it out: "Internal error from Core"
        (grpc.StatusCode.INVALID_ARGUMENT, False),
        (grpc.StatusCode.FAILED_PRECONDITION, False),
        (grpc.StatusCode.UNIMPLEMENTED, False),
    ],
)
def test_a_lost_connection_is_transient_and_a_refusal_is_not(code: grpc.StatusCode, transient: bool) -> None:
    error = aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), "details", None)
    assert is_transient(error) is transient


@pytest.mark.parametrize(
    ("page", "world_size"),
    [
        (b"\xff no protobuf", 1),
        (pb.GetViewResponse(members=[pb.Member(rank=0)]).SerializeToString(), 2**32 - 1),
        (pb.GetViewResponse(members=[pb.Member(rank=1)]).SerializeToString(), 1),
    ],
    ids=["no protobuf", "enormous", "wrong rank"],
)
def test_a_malformed_member_list_page_raises_paceline_error(page: bytes, world_size: int) -> None:
    class Channel:
        async def call(self, make: Callable[[Any], Awaitable[bytes]]) -> bytes:
            return page

    view = MemberList(3, world_size, hashlib.sha256(page).digest(), pages=1)
    with pytest.raises(errors.PacelineError, match="member list of generation 3"):
        asyncio.run(MemberLists().fetch(Channel(), "job", view, 1.0))  # type: ignore[arg-type]
