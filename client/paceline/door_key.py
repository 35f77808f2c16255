"""What opens the doors of a job's members to each other: a secret of the job, which the coordinator sends to sessions.

Addresses and member ids are no secrets: member lists, logs and `paceline status` have them. So each call to a door
proves that its caller has the secret, by a code over the whole request, which names the callee, and over a number that
the caller never uses again. A door remembers which numbers it has seen of each caller (the anti-replay window of IPsec,
RFC 4303, 3.4.3), so that what somebody has overheard does not open it a second time.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
from collections import OrderedDict
from typing import Any

from google.protobuf.message import Message

from paceline._grpc import aio

__all__ = ["METADATA", "DoorKey", "proving"]

METADATA = "paceline-door-bin"
"""Where a call has its proof."""

WINDOW = 1024
"""So far a call of one caller may come behind others that it made later."""

MAX_CALLERS = 16_384
"""Callers whose numbers a door remembers: three times as many as a job has sessions at most. One more, and the one that
has not called for the longest time is forgotten: only what that one once sent could be sent again."""

_HEAD = struct.Struct(">Q32s")
"""Number and code; the caller's member id follows."""

_MAX_ID_BYTES = 64


class DoorKey:
    """One member's: it proves itself by it, and checks others. Everything runs on the loop.

    Nothing is proved, and nobody is believed, before `learn`.
    """

    def __init__(self) -> None:
        self._secret = b""
        self._member_id = b""
        self._numbers = itertools.count(1)
        self._seen: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # the highest number, and a bit for each below

    def learn(self, secret: bytes, member_id: str) -> None:
        """This process is that member of the job with that secret from now on."""
        if secret != self._secret:
            self._seen.clear()
        self._secret, self._member_id = secret, member_id.encode()

    def prove(self, request: Message) -> bytes:
        """The proof for one call with this request. Another call needs another one."""
        number = next(self._numbers)
        code = self._code(request.DESCRIPTOR.name, number, self._member_id, request.SerializeToString())
        return _HEAD.pack(number, code) + self._member_id

    def check(self, name: str, data: bytes, proof: bytes | None) -> str:
        """Why a call is not let in; empty if it is. The same call is let in once.

        Args:
            name: of the request's message.
            data: the request's bytes.
            proof: what the call has at METADATA, None for nothing.
        """
        if not self._secret:
            return "this worker is not registered yet"
        if proof is None or not _HEAD.size <= len(proof) <= _HEAD.size + _MAX_ID_BYTES:
            return "the caller does not prove that it is of this job"
        number, code = _HEAD.unpack_from(proof)
        caller = proof[_HEAD.size :]
        if not hmac.compare_digest(code, self._code(name, number, caller, data)):
            return "the caller does not prove that it is of this job, or not as it is now"
        highest, seen = self._seen.pop(caller, (0, 0))
        ahead = number - highest
        again = ahead <= -WINDOW or (ahead <= 0 and bool(seen >> -ahead & 1))
        if ahead > 0:
            highest, seen = number, (seen << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
        elif not again:
            seen |= 1 << -ahead
        self._seen[caller] = highest, seen
        if len(self._seen) > MAX_CALLERS:
            self._seen.popitem(last=False)
        return "this call has come before" if again else ""

    def _code(self, name: str, number: int, caller: bytes, data: bytes) -> bytes:
        head = name.encode() + b"\0" + number.to_bytes(8, "big") + len(caller).to_bytes(1, "big") + caller
        return hmac.digest(self._secret, head + data, hashlib.sha256)

    def __repr__(self) -> str:
        return "DoorKey(...)"


def proving(key: DoorKey) -> list[Any]:
    """The interceptors that a channel to another member's door needs: each try of a call gets a proof of its own."""
    return [_ProvesUnary(key), _ProvesStream(key)]  # of one object with both methods, grpc would call one only


class _ProvesUnary(aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # not generic at run time
    def __init__(self, key: DoorKey) -> None:
        self._key = key

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """See `grpc.aio`."""
        return await continuation(_proved(self._key, client_call_details, request), request)


class _ProvesStream(aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]  # not generic at run time
    def __init__(self, key: DoorKey) -> None:
        self._key = key

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """See `grpc.aio`."""
        return await continuation(_proved(self._key, client_call_details, request), request)


def _proved(key: DoorKey, details: Any, request: Message) -> Any:
    return details._replace(metadata=aio.Metadata(*(details.metadata or ()), (METADATA, key.prove(request))))
