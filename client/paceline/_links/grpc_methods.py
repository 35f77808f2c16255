"""Methods of a worker's door whose requests this module reads and parses, and how a door refuses a call.

grpc itself would wait for ever for a request that does not end. It would answer bytes that are no message with UNKNOWN
and the text of a Python exception. It does not bound what it keeps either. It has one limit to a message's length for
all methods, a frame's, and applies it only while a handler reads. For an unread stream it keeps a window, which
grows to tens of MiB on a fast network. So this module reads every request at once, to the end of its stream, and limits
how many are read at one time, and for how long. A caller that reaches the port can make a door keep 4 MiB for each of
`RequestLimits.many` requests, and beyond them the bytes that arrive within `hurried_s`. One connection can make it keep
4 MiB for each of `MAX_READING_EACH` requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from paceline._base.addresses import is_exhausted
from paceline._base.proofs import METADATA, DoorKey
from paceline._base.rpc import EOF, grpc, rpc_status
from pacelinepb import ERROR_DOMAIN
from pacelinepb.bounds import too_much
from pacelinepb.memory_guard import Callers
from pacelinepb.v1.errors_pb2 import ErrorReason

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

MAX_REQUEST_BYTES = 64 << 10
"""Longest request in bytes; the longest that members send are well below 1 KiB."""

MAX_REFUSAL_BYTES = 1000
"""Longest text of a refusal. The trailers contain it twice, once with up to 3 bytes for each, and grpc accepts 8 KiB of
trailers. With more, the caller would get a status of grpc's own and no reason."""

MAX_SHOWN = 80
"""Characters of a caller's own text that a refusal repeats."""

MAX_READING_EACH = 16
"""Most requests of one connection that are read at one time."""

_MANY_EACH = 4
"""Requests of one connection that may take `read_s` seconds; those above this number get `hurried_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of `Requests` for requests that have not arrived completely."""

    read_s: float = 10.0
    """Seconds for a request to arrive."""

    hurried_s: float = 1.0
    """The same while there are many requests."""

    many: int = 32
    """Requests read at one time; if there are more, all of them get `hurried_s`."""

    max_reading: int = 512
    """Most requests read at one time. The door refuses one more at once, and its caller tries again."""


class Requests:
    """Reads the requests of one door, and makes its methods.

    `key` checks the callers' proofs; None admits every caller. `callers` is told of the calls that are admitted.
    `on_exhausted` is called if a method fails because this process has no memory, thread or descriptor left.
    """

    def __init__(self, key: DoorKey | None, callers: Callers, *, limits: RequestLimits = RequestLimits()) -> None:
        self._key = key
        self._callers = callers
        self._limits = limits
        self.on_exhausted: Callable[[BaseException], None] = lambda error: None
        self._reading: Counter[str] = Counter()  # by connection
        self._unhurried: set[asyncio.Timeout] = set()

    def unary_method(
        self, request: type[Q], response: type[R], handler: Callable[[Q, Any], Awaitable[R]]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Makes a method with one answer."""

        async def handle(_: Any, context: Any) -> None:
            with self._telling():
                message = await self._parsed(request, context)
                with self._callers.one(context.peer()):
                    await context.write(await handler(message, context))

        made: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            handle, response_serializer=response.SerializeToString
        )
        return made

    def streaming_method(
        self, request: type[Q], response: type[R], handler: Callable[[Q, Any], AsyncIterator[R]]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Makes a method with a stream of answers."""

        async def handle(_: Any, context: Any) -> AsyncIterator[R]:
            with self._telling():
                message = await self._parsed(request, context)
                with self._callers.one(context.peer()):
                    async for answer in handler(message, context):
                        yield answer

        made: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            handle, response_serializer=response.SerializeToString
        )
        return made

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if is_exhausted(error):
                self.on_exhausted(error)
            raise

    async def _parsed(self, request: type[Q], context: Any) -> Q:
        name = request.DESCRIPTOR.name
        data, is_all = await self._read(name, context)
        if len(data) > MAX_REQUEST_BYTES:
            text = f"a {name} of {len(data)} bytes is above the limit of {MAX_REQUEST_BYTES}"
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorReason.ERROR_REASON_LIMIT, text)
        if not is_all:
            text = f"a call must have exactly one {name}"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        if self._key is not None and (trouble := self._key.check(name, data, _proof(context))):
            reason = ErrorReason.ERROR_REASON_UNAUTHENTICATED
            # UNAVAILABLE lets the caller try again: it may have learnt the secret from the coordinator first.
            await refuse(context, grpc.StatusCode.UNAVAILABLE, reason, trouble)
        try:
            message = request.FromString(data)
        except DecodeError:
            text = f"the bytes of the request are not a {name}"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        if text := too_much(message):
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorReason.ERROR_REASON_LIMIT, text)
        return message

    async def _read(self, name: str, context: Any) -> tuple[bytes, bool]:
        """Returns the first message of a call, and whether it is the only one."""
        connection, limits = context.peer(), self._limits
        if self._reading.total() >= limits.max_reading or self._reading[connection] >= MAX_READING_EACH:
            text = "too many calls at one time are waiting for their request"
            await refuse(context, grpc.StatusCode.UNAVAILABLE, ErrorReason.ERROR_REASON_LIMIT, text)
        self._reading[connection] += 1
        # The read is not cancelled at the timeout, because grpc would leak a message that arrives at that moment. It
        # ends with the call.
        read = asyncio.ensure_future(_first(context))
        read.add_done_callback(lambda task: task.cancelled() or task.exception())
        limit = asyncio.timeout(self._seconds(connection))
        try:
            async with limit:
                self._unhurried.add(limit)
                await asyncio.wait((read,))
        except TimeoutError:
            text = f"the {name} did not arrive completely in time"
            await refuse(context, grpc.StatusCode.UNAVAILABLE, ErrorReason.ERROR_REASON_LIMIT, text)
        finally:
            self._unhurried.discard(limit)
            self._reading[connection] -= 1
            if not self._reading[connection]:
                del self._reading[connection]
        return read.result()

    def _seconds(self, connection: str) -> float:
        """Returns the seconds for one more request on a connection. If it makes too many, hurries the others too."""
        limits = self._limits
        if self._reading.total() > limits.many:
            soon = asyncio.get_running_loop().time() + limits.hurried_s
            for limit in self._unhurried:
                when = limit.when()
                if when is not None and when > soon and not limit.expired():
                    limit.reschedule(soon)
            self._unhurried.clear()
            return limits.hurried_s
        return limits.hurried_s if self._reading[connection] > _MANY_EACH else limits.read_s


def _proof(context: Any) -> bytes | None:
    for name, value in context.invocation_metadata() or ():
        if name == METADATA:
            return value if isinstance(value, bytes) else None
    return None


async def _first(context: Any) -> tuple[bytes, bool]:
    data = await context.read()
    if data is EOF:
        return b"", False
    return data, len(data) <= MAX_REQUEST_BYTES and await context.read() is EOF


async def refuse(context: Any, code: grpc.StatusCode, reason: ErrorReason.ValueType, text: str) -> NoReturn:
    """Ends the call with a `google.rpc.ErrorInfo`, by which the caller can distinguish the kinds of refusal."""
    info = error_details_pb2.ErrorInfo(
        domain=ERROR_DOMAIN, reason=ErrorReason.Name(reason).removeprefix("ERROR_REASON_")
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    message = text.encode(errors="replace")[:MAX_REFUSAL_BYTES].decode(errors="ignore")
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status always raises")


def shown(text: str) -> str:
    """Returns a caller's text in a form that can be repeated: printable and short."""
    return repr(text[:MAX_SHOWN])[:MAX_SHOWN]
