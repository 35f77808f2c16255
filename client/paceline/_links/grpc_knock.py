"""Knocking: does a worker's door answer, and does that worker reach one's own door?

Two hosts may reach each other in one direction only: an address that leads elsewhere, packets that are lost, a
certificate that the other side does not take. So a newcomer asks each member to knock at its door in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline._address import parse_endpoint
from paceline._grpc import aio, grpc
from paceline._links.grpc_methods import Requests, refuse, shown
from paceline._rpc import call_options
from paceline.credentials import Credentials
from pacelinepb.v1 import peer_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub

__all__ = ["Knocker", "Knocks", "knock"]

MAX_AT_ONCE = 64
"""Doors that one worker knocks at for others at one time; one more is told so, and asks again."""

MAX_ADDRESS_BYTES = 512
"""Of an address (peer.proto)."""

MAX_TEXT = 500
"""Characters of what is in the way."""

_MOST_SECONDS = 10.0
"""For a knock in turn, however patient the caller is."""

_LEAST_SECONDS = 0.2
"""For a knock in turn, however impatient the caller is: no connection is made in less."""

_SHARE = 2 / 3
"""Of the time that the caller has left: the rest is for the answer, and for a machine that is busy."""

_WORDS_SECONDS = 0.2
"""To hear from grpc why a door that did not answer in time could not be reached."""


@dataclass(frozen=True, slots=True)
class Knocker:
    """Who knocks.

    Attributes:
        member_id: its id.
        address: where its own door is, "host:port".
    """

    member_id: str
    address: str


class Knocks:
    """The handler of Knock at one door.

    Args:
        job: the job whose members may knock.
        member_id: says who lives here, "" until that is known.
        credentials: by what members know each other.
    """

    def __init__(self, job: str, member_id: Callable[[], str], credentials: Credentials) -> None:
        self._job = job
        self._member_id = member_id
        self._credentials = credentials
        self._under_way = 0

    def handlers(self, requests: Requests) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """By the names of the methods."""
        return {"Knock": requests.unary_method(peer_pb2.KnockRequest, peer_pb2.KnockResponse, self._answer)}

    async def _answer(self, request: peer_pb2.KnockRequest, context: Any) -> peer_pb2.KnockResponse:
        own = self._member_id()
        if request.job != self._job or request.to_member != own or not own:  # a stranger learns and moves nothing
            text = f"this is not member {shown(request.to_member)} of job {shown(request.job)}"
            await refuse(context, grpc.StatusCode.NOT_FOUND, ErrorReason.ERROR_REASON_NOT_FOUND, text)
        if not request.address:
            return peer_pb2.KnockResponse()
        if not _is_address(request.address):
            text = f"{shown(request.address)} is no address of a door"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        if self._under_way >= MAX_AT_ONCE:
            text = f"this worker knocks at {MAX_AT_ONCE} doors already"
            await refuse(context, grpc.StatusCode.UNAVAILABLE, ErrorReason.ERROR_REASON_LIMIT, text)
        seconds = _seconds_in_turn(context.time_remaining())
        self._under_way += 1
        try:
            async with self._credentials.member_channel(request.address, options=call_options(seconds)) as channel:
                await knock(channel, self._job, request.from_member, Knocker(own, ""), seconds)
        except aio.AioRpcError as error:
            return peer_pb2.KnockResponse(trouble=_words(error, seconds))
        finally:
            self._under_way -= 1
        return peer_pb2.KnockResponse()


async def knock(channel: aio.Channel, job: str, to_member: str, own: Knocker, seconds: float) -> str:
    """Knocks at a door, again and again while nobody can be reached there.

    Args:
        channel: to the door.
        job: the job.
        to_member: who lives there.
        own: who knocks; with an address, that door is knocked at in turn.
        seconds: for the answer.

    Returns:
        What keeps that member from the caller's door; empty for nothing.

    Raises:
        AioRpcError: there is no answer, or the call is refused.
    """
    method = PeerServiceStub(channel).Knock
    request = peer_pb2.KnockRequest(job=job, from_member=own.member_id, to_member=to_member, address=own.address)
    try:
        answer = await method(request, timeout=seconds, wait_for_ready=True)
    except aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        # A call that waits until the channel is ready does not say why it is not.
        request.address = ""
        try:
            await method(request, timeout=_WORDS_SECONDS)
        except aio.AioRpcError as known:
            if known.code() is grpc.StatusCode.UNAVAILABLE:
                raise known from error
            raise error from None
        # It answers after all. Whether it reaches the caller, if that was asked, it has not said.
        return f"it has not said within {seconds:.1f} s that it does" if own.address else ""
    return "".join(letter if letter.isprintable() else "?" for letter in answer.trouble[:MAX_TEXT])


def _seconds_in_turn(left: float | None) -> float:
    """For a knock in turn; `left` is what the caller has, None for any time."""
    if left is None:
        return _MOST_SECONDS
    return min(_MOST_SECONDS, max(_LEAST_SECONDS, _SHARE * left - _WORDS_SECONDS))


def _is_address(text: str) -> bool:
    try:
        return len(text.encode()) <= MAX_ADDRESS_BYTES and parse_endpoint(text).port > 0
    except ValueError:
        return False


def _words(error: aio.AioRpcError, seconds: float) -> str:
    """Why a door was not got through to."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {seconds:.1f} s"
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return "another worker answers there"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "what answers there is no worker of this version"
    return (error.details() or error.code().name)[:MAX_TEXT]
