"""Proofs of who a caller is: a token to the coordinator, and the job's secret to another member.

**The token** is a text, or a file that is read again at most once a second. If the file cannot be read or is empty for
a moment, because it is being changed, the last token stays in use and an error is logged. The coordinator treats its
own file in the same way. Reading the file can hang for ever if its network is down. So each reading has a daemon
thread, one at a time, and calls wait for it only briefly. In asyncio's pool a reading would delay every call and keep
the process from ending.

**The secret** comes from the coordinator, to each session of the job. Addresses and member ids are no secrets: member
lists, logs and `paceline status` show them. So each call to a member's door proves that its caller has the secret. The
proof is an HMAC over the request, which names the callee, and over a number that the caller never uses again. A door
remembers which numbers it has seen from each caller (the anti-replay window of IPsec, RFC 4303, 3.4.3), so an overheard
call cannot be repeated. Each line has a new secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import logging
import struct
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from paceline._base.rpc import aio
from pacelinepb.private_files import FileTooOpen, read_private
from pacelinepb.token_lines import token_flaw, token_lines

_log = logging.getLogger("paceline.session")


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Times of a `TokenSource` that reads a file.

    Attributes:
        look_s: seconds between two readings.
        patience_s: seconds that calls wait for a reading, from its beginning. Later calls use a token that comes later.
        first_s: seconds to wait for the first reading, without which there is no token.
    """

    look_s: float = 1.0
    patience_s: float = 0.5
    first_s: float = 10.0


_MAX_FILE_BYTES = 1 << 20


class TokenSource:
    """The current token. Its `repr` does not contain the token. Thread-safe.

    It is given as the text, or as the path of a file, whose token is the first word of the first line that is neither
    empty nor a comment (`#`). So a coordinator's file can be used. `times` are for a file.

    Raises:
        ValueError: the file cannot be read within `times.first_s`, or contains no valid token; `FileTooOpen` if other
            users may read it.
    """

    def __init__(self, token: str | Path, times: TokenTimes = TokenTimes()) -> None:
        self._times = times
        self._path = token if isinstance(token, Path) else None
        self._lock = threading.Lock()
        self._reading: Future[str] | None = None
        self._began_at = time.monotonic()
        self._trouble = ""
        if isinstance(token, str):
            if flaw := token_flaw(token):  # gRPC's own error would show the token
                raise ValueError(f"the token {flaw}")
            self._token = token
            return
        try:
            self._token = _start(token).result(times.first_s)
        except TimeoutError:
            raise ValueError(f"cannot read the token file {token}: no answer in {times.first_s:g} s") from None

    async def current(self) -> str:
        """Returns the token to show now. Waits for a reading of the file, for half a second at most."""
        reading = None if self._path is None else self._newest_reading(self._path)
        left = self._began_at + self._times.patience_s - time.monotonic()
        if reading is not None and not reading.done() and left > 0:
            try:
                async with asyncio.timeout(left):
                    await asyncio.wrap_future(reading)
            except TimeoutError:
                self._complain(f"the token file {self._path} has not been read for {self._times.patience_s:g} s")
            except ValueError:
                pass  # `_take` has logged it
        return self._token

    def __repr__(self) -> str:
        return "TokenSource(...)" if self._path is None else f"TokenSource({str(self._path)!r})"

    def _newest_reading(self, path: Path) -> Future[str] | None:
        """Returns the reading that is under way, or the last one; starts a new one if it is time."""
        with self._lock:
            free = self._reading is None or self._reading.done()
            if free and time.monotonic() - self._began_at >= self._times.look_s:
                self._began_at = time.monotonic()
                try:
                    self._reading = _start(path)
                except RuntimeError as error:  # no thread can be started
                    self._complain(f"cannot read the token file {path}: {error}")
                else:
                    self._reading.add_done_callback(self._take)
            return self._reading

    def _take(self, reading: Future[str]) -> None:
        """Takes over the token of a reading, before any call that waits for it goes on."""
        if (error := reading.exception()) is not None:
            self._complain(str(error))
        else:
            self._token, self._trouble = reading.result(), ""

    def _complain(self, trouble: str) -> None:
        """Logs a problem once, not at every reading."""
        if trouble != self._trouble:
            _log.error("%s; the last token stays in use", trouble)
        self._trouble = trouble


def _start(path: Path) -> Future[str]:
    """Reads the token in a file, on a daemon thread of its own."""
    answer: Future[str] = Future()
    answer.set_running_or_notify_cancel()  # a call that stops waiting must not cancel it for others

    def run() -> None:
        try:
            found = _read(path)
        except BaseException as error:  # noqa: BLE001  the waiting call raises it
            answer.set_exception(error)
        else:
            answer.set_result(found)

    threading.Thread(target=run, name="paceline-token", daemon=True).start()
    return answer


def _read(path: Path) -> str:
    try:
        text = read_private(path, _MAX_FILE_BYTES).decode("utf-8", "replace")
    except FileTooOpen as error:
        raise FileTooOpen(f"the token file {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read the token file {path}: {error.strerror or error}") from None
    try:
        for _, token, _ in token_lines(text):
            return token
    except ValueError as error:
        raise ValueError(f"the token file {path}: {error}") from None
    raise ValueError(f"there is no token in {path}")


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
    """Makes the proofs of one member, and checks its callers' proofs. Everything runs on the loop.

    It refuses every call before `learn`. It remembers the numbers of `max_callers` callers, and forgets the oldest.
    """

    def __init__(self, *, max_callers: int = MAX_CALLERS) -> None:
        self._max_callers = max_callers
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

        `name` is the name of the request's message type; `proof` is the call's metadata value under METADATA.
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
        if len(self._seen) > self._max_callers:
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
