"""Proofs in calls between members of a job. The coordinator sends a secret to each session of the job.

Addresses and member ids are no secrets: member lists, logs and `paceline status` show them. So each call to a member's
door proves that its caller has the secret. The proof is an HMAC over the request, which names the callee, and over a
number that the caller never uses again. A door remembers which numbers it has seen from each caller (the anti-replay
window of IPsec, RFC 4303, 3.4.3), so an overheard call cannot be repeated. Each line has a new secret.
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
"""The metadata key of a call's proof."""

WINDOW = 1024
"""How many numbers below a caller's highest one a door remembers: a call may arrive that far behind later ones."""

MAX_CALLERS = 16_384
"""Callers whose numbers a door remembers: three times a job's largest number of sessions. If there is one more, the
door forgets the caller that has not called for the longest time. Only that caller's calls could be repeated then."""

_HEAD = struct.Struct(">Q32s")
"""The head of a proof: number and HMAC. The caller's member id follows."""

_MAX_ID_BYTES = 64


class DoorKey:
    """Makes the proofs of one member, and checks those of its callers. Everything runs on the loop.

    It refuses every call before `learn`.
    """

    def __init__(self) -> None:
        self._secret = b""
        self._member_id = b""
        self._numbers = itertools.count(1)
        self._seen: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # highest number, and a bit for each below

    def learn(self, secret: bytes, member_id: str) -> None:
        """Sets the job's secret and this process's member id."""
        self._secret, self._member_id = secret, member_id.encode()

    def prove(self, request: Message) -> bytes:
        """Returns the proof for one call with this request. Each call needs its own proof."""
        number = next(self._numbers)
        code = self._code(request.DESCRIPTOR.name, number, self._member_id, request.SerializeToString())
        return _HEAD.pack(number, code) + self._member_id

    def check(self, name: str, data: bytes, proof: bytes | None) -> str:
        """Returns why a call is refused; empty if it is admitted. The same call is admitted only once.

        Args:
            name: the name of the request's message type.
            data: the request's bytes.
            proof: the call's metadata value under METADATA; None if it has none.
        """
        if not self._secret:
            return "this worker is not registered yet"
        if proof is None or not _HEAD.size <= len(proof) <= _HEAD.size + _MAX_ID_BYTES:
            return "the caller does not prove that it belongs to this job"
        number, code = _HEAD.unpack_from(proof)
        caller = proof[_HEAD.size :]
        if not hmac.compare_digest(code, self._code(name, number, caller, data)):
            return "the caller does not prove that it belongs to this job, or its proof is out of date"
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
        return "this call was made before" if again else ""

    def mark(self, name: str) -> str:
        """Returns 64 hexadecimal digits for the name of a file, which only processes with the secret can compute."""
        return hmac.digest(self._secret, b"stacks\0" + name.encode(), hashlib.sha256).hex()

    def _code(self, name: str, number: int, caller: bytes, data: bytes) -> bytes:
        head = name.encode() + b"\0" + number.to_bytes(8, "big") + len(caller).to_bytes(1, "big") + caller
        return hmac.digest(self._secret, head + data, hashlib.sha256)

    def __repr__(self) -> str:
        return "DoorKey(...)"


def proving(key: DoorKey) -> list[Any]:
    """Returns the interceptors of a channel to another member's door. Each attempt of a call gets its own proof."""
    return [_ProvesUnary(key), _ProvesStream(key)]  # two objects: of one with both methods, grpc would call only one


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
