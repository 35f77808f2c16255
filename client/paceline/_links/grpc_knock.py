"""Knocking: checks whether a worker's door answers, and whether that worker can reach the caller's own door.

Two hosts may reach each other in one direction only, if an address leads elsewhere, packets are lost, or one side does
not accept the other's certificate. So a newcomer asks each member to knock at its door in turn.

A call into C may hold the interpreter of a member for minutes. Then its door answers no call, but gRPC still accepts
connections there, on threads of its own (`process_runs`). The door of a process that is stopped or dead does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline._base.addresses import parse_endpoint
from paceline._base.rpc import aio, call_options, grpc
from paceline._links.grpc_methods import Requests, refuse, shown
from paceline.credentials import Credentials
from pacelinepb.v1 import peer_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub

MAX_AT_ONCE = 64
"""Doors that one worker knocks at for others at one time. It refuses one more caller, which asks again."""

MAX_ADDRESS_BYTES = 512
"""Longest address in bytes (peer.proto)."""

MAX_TEXT = 500
"""Longest description of what is in the way, in characters."""

_MOST_SECONDS = 10.0
"""Longest time in seconds for a knock in turn, whatever the caller's deadline."""

LEAST_SECONDS = 0.2
"""Shortest time in seconds for a knock in turn, whatever the caller's deadline: no connection is made in less."""

_SHARE = 2 / 3
"""Share of the caller's remaining time for a knock in turn. The rest is for the answer, and for a busy machine."""

_WORDS_SECONDS = 0.2
"""Seconds to learn from grpc why a door that did not answer in time could not be reached."""

_CONNECT_SECONDS = 1.0
"""Seconds for the door of a process that runs to take a connection: milliseconds, unless a packet is lost."""


@dataclass(frozen=True, slots=True)
class Knocker:
    """The worker that knocks, and the address of its own door, "host:port"."""

    member_id: str
    address: str


class Knocks:
    """The handler of Knock at one door; `member_id` returns this worker's member id, "" until it is known.

    It knocks at `max_at_once` doors at most at one time, and gives each at least `least_s` seconds, however close the
    caller's deadline is.
    """

    def __init__(
        self,
        job: str,
        member_id: Callable[[], str],
        credentials: Credentials,
        *,
        max_at_once: int = MAX_AT_ONCE,
        least_s: float = LEAST_SECONDS,
    ) -> None:
        self._job = job
        self._member_id = member_id
        self._credentials = credentials
        self._max_at_once = max_at_once
        self._least_s = least_s
        self._under_way = 0

    def handlers(self, requests: Requests) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Returns the handlers by the names of the methods."""
        return {"Knock": requests.unary_method(peer_pb2.KnockRequest, peer_pb2.KnockResponse, self._answer)}

    async def _answer(self, request: peer_pb2.KnockRequest, context: Any) -> peer_pb2.KnockResponse:
        own = self._member_id()
        if request.job != self._job or request.to_member != own or not own:  # do nothing for strangers
            text = f"this is not member {shown(request.to_member)} of job {shown(request.job)}"
            await refuse(context, grpc.StatusCode.NOT_FOUND, ErrorReason.ERROR_REASON_NOT_FOUND, text)
        if not request.address:
            return peer_pb2.KnockResponse()
        if not _is_address(request.address):
            text = f"{shown(request.address)} is not the address of a door"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        if self._under_way >= self._max_at_once:
            text = f"this worker is knocking at {self._max_at_once} doors already"
            await refuse(context, grpc.StatusCode.UNAVAILABLE, ErrorReason.ERROR_REASON_LIMIT, text)
        seconds = _seconds_in_turn(context.time_remaining(), self._least_s)
        self._under_way += 1
        try:
            async with self._credentials.member_channel(request.address, options=call_options(seconds)) as channel:
                await knock(channel, self._job, request.from_member, Knocker(own, ""), seconds)
        except aio.AioRpcError as error:
            return peer_pb2.KnockResponse(trouble=_words(error, seconds))
        finally:
            self._under_way -= 1
        return peer_pb2.KnockResponse()


async def knock(
    channel: aio.Channel, job: str, to_member: str, own: Knocker, seconds: float, *, words_s: float = _WORDS_SECONDS
) -> str:
    """Knocks at a door, and retries while it cannot be reached, for at most `seconds`.

    Returns the reason why that member cannot reach the caller's door, empty if it can: if `own` has an address, the
    member knocks at that door in turn. Raises AioRpcError if there is no answer, or the call is refused. After a
    timeout it takes up to `words_s` more to learn from grpc why.
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
            await method(request, timeout=words_s)
        except aio.AioRpcError as known:
            if known.code() is grpc.StatusCode.UNAVAILABLE:
                raise known from error
            raise error from None
        # It answers after all, but has not said whether it reaches the caller, if it was asked.
        return f"it did not confirm within {seconds:.1f} s that it can" if own.address else ""
    return "".join(letter if letter.isprintable() else "?" for letter in answer.trouble[:MAX_TEXT])


async def process_runs(address: str, credentials: Credentials) -> bool:
    """Returns True if the process behind a door, "host:port", runs: it has taken a new connection.

    The kernel alone cannot do that: gRPC waits for the door's first HTTP/2 frame, with TLS after the handshake.
    """
    options = [*call_options(_CONNECT_SECONDS), ("grpc.use_local_subchannel_pool", 1)]  # no connection from before
    async with credentials.member_channel(address, options) as channel:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await channel.channel_ready()
        except TimeoutError:
            return False
        return True


def _seconds_in_turn(left: float | None, least_s: float = LEAST_SECONDS) -> float:
    """Returns the seconds for a knock in turn. `left` is the caller's remaining time, None for no limit."""
    if left is None:
        return _MOST_SECONDS
    return min(_MOST_SECONDS, max(least_s, _SHARE * left - _WORDS_SECONDS))


def _is_address(text: str) -> bool:
    try:
        return len(text.encode()) <= MAX_ADDRESS_BYTES and parse_endpoint(text).port > 0
    except ValueError:
        return False


def _words(error: aio.AioRpcError, seconds: float) -> str:
    """Returns why a door could not be reached."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {seconds:.1f} s"
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return "another worker answers there"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "the process that answers there is not a worker of this version"
    return (error.details() or error.code().name)[:MAX_TEXT]
