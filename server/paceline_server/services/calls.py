"""Serves each call at its payer's pace, and within its payer's share of the coordinator's memory.

*Pace.* grpc hands a unary call over when its request is complete, and waits for that as long as the caller likes. So
unary handlers are served as streams: this module reads the request, within a time limit. A call waits for its turn
before anything of it is read. So does a call that will be refused because it has no token: a refusal costs as much as
an answer.

*Memory.* A call costs `CALL_BYTES` from its first moment. That covers one incomplete message, which grpc holds before
any handler sees it. Further messages of a request, and the answer, are counted as they come. Calls that last leave
their payer room for a call that does not: a key that a thousand calls wait for can still be set.

A long request comes as several messages (`pacelinepb.pieces`). Its handler gets it as one message.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, MutableSequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from google.protobuf.message import Message

from paceline_server._grpc import EOF, aio, grpc
from paceline_server.errors import LimitMet, NoRoom
from paceline_server.limits import Budget, Pacers, is_unknown
from paceline_server.services.authenticate import authorization_of
from paceline_server.services.probes import PROBE, Probes
from paceline_server.services.refusals import refuse
from paceline_server.settings import ServerSettings
from paceline_server.vitals import Vitals
from pacelinepb.memory_guard import Callers
from pacelinepb.pieces import MESSAGE_BYTES
from pacelinepb.v1 import session_pb2, store_pb2

CALL_BYTES = 48 << 10
"""The cost of any open call: a `Get` that waits takes some 27 KB, and grpc may hold 16 KiB unread."""

_TIMES = 3
"""Copies of a request in memory: its bytes, the parsed message, and Python objects."""


class OpenCalls:
    """All open calls of a coordinator."""

    def __init__(self, budget: Budget, longest: int) -> None:
        self._budget = budget
        self._spare = CALL_BYTES + _TIMES * longest

    @contextmanager
    def one(self, payer: str, lasts: bool = False) -> Iterator[OpenCall]:
        """Counts a call while it is open; one that `lasts` may stay open without limit. Raises `NoRoom`."""
        call = OpenCall(self, payer)
        call.take(CALL_BYTES, self._spare if lasts else 0)
        try:
            yield call
        finally:
            self.free(payer, call.held)

    def take(self, payer: str, size: int, spare: int) -> None:
        """See `OpenCall.take`."""
        budget = self._budget
        if not budget.take(payer, size, spare):
            held, used, total = (each >> 20 for each in (budget.held(payer), budget.used, budget.total))
            raise NoRoom(
                f"the open calls of {payer} take {held} MiB of the coordinator's memory, and all open calls {used} of "
                f"{total} MiB: no room is left; give the coordinator more memory if many workers call"
            )

    def free(self, payer: str, size: int) -> None:
        """Gives back bytes that were taken."""
        self._budget.add(payer, -size)


class OpenCall:
    """A call that is open."""

    def __init__(self, calls: OpenCalls, payer: str) -> None:
        self._calls = calls
        self.payer = payer
        self.held = 0

    def take(self, size: int, spare: int = 0) -> None:
        """Counts more bytes; raises `NoRoom` if the payer has none for them and for `spare` bytes besides."""
        self._calls.take(self.payer, size, spare)
        self.held += size

    def give_back(self) -> None:
        """Stops counting the messages of the call, which have been dropped."""
        self._calls.free(self.payer, self.held - CALL_BYTES)
        self.held = CALL_BYTES

    def take_message(self, size: int) -> None:
        """Counts one message of a request, or an answer."""
        self.take(_TIMES * size)


_Serve = Callable[[Any, "aio.ServicerContext[Any, Any]", OpenCall], Awaitable[None]]
_Read = Callable[["aio.ServicerContext[Any, Any]", OpenCall], Awaitable[Any]]

_STORE = store_pb2.DESCRIPTOR.services_by_name["StoreService"]
_SESSIONS = session_pb2.DESCRIPTOR.services_by_name["SessionService"]

_LONG = frozenset(
    f"/{service.full_name}/{method.name}"
    for service in (_STORE, _SESSIONS)
    for method in service.methods
    if method.client_streaming and not method.server_streaming
)
"""Calls whose request may come as several messages."""

_LASTING = frozenset(
    (*(f"/{_STORE.full_name}/{name}" for name in ("Get", "Wait")), f"/{_SESSIONS.full_name}/AnswerAsk")
)
"""Calls with one answer that may wait for other calls, and so last like streams."""

_MOST_PAYERS = 20_000
"""The most payers whose pace is remembered: each takes 0.3 KB."""


class PacingInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Paces all calls but probes, by payer. Messages of a session's stream are paced where they are read.

    `payer_of` gives the payer of a call, from its `authorization` and its peer. `callers` is told of the calls that
    have a valid token, or need none. `probes` serves the probes.
    """

    def __init__(
        self,
        settings: ServerSettings,
        calls: OpenCalls,
        payer_of: Callable[[str | None, str], str],
        vitals: Vitals,
        callers: Callers,
        probes: Probes,
    ) -> None:
        self._pacers = Pacers(settings.call_rate, settings.call_burst, _MOST_PAYERS)
        self._settings = settings
        self._calls = calls
        self._payer_of = payer_of
        self._vitals = vitals
        self._callers = callers
        self._probes = probes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Makes calls wait for their turn."""
        handler = await continuation(handler_call_details)
        if not handler:  # grpc gives None for a method that is not served; its stubs do not say so
            return handler
        method, authorization = handler_call_details.method, authorization_of(handler_call_details)
        lasts = handler.unary_unary is None or method in _LASTING
        is_long, parse = method in _LONG, handler.request_deserializer
        read = self._merged(parse) if is_long else _message
        if handler.unary_unary is not None:
            serve = self._answering(handler.unary_unary, read)
        elif handler.unary_stream is not None:
            serve = self._reading(handler.unary_stream, read)
        else:
            assert handler.stream_stream is not None, "no service here has such a method"
            serve = _streaming(handler.stream_stream)

        async def probe(_: object, context: aio.ServicerContext[Any, Any]) -> None:
            await self._probes.serve(handler.unary_unary, context)

        async def count(requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
            peer = context.peer()
            payer = self._payer_of(authorization, peer)
            known: AbstractContextManager[None] = nullcontext() if is_unknown(payer) else self._callers.one(peer)
            try:
                with known, self._calls.one(payer, lasts) as call:
                    await self._turn(payer)
                    await serve(requests, context, call)
            except NoRoom as refused:
                await refuse(context, refused, self._vitals)

        async def handle(requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
            try:
                await (probe if method == PROBE else count)(requests, context)
            except aio.AbortError as ended:
                # grpc keeps the exception with the call, so its traceback must not refer to the call. This cycle would
                # keep the request in memory until the garbage collector runs, which would then hold up the loop.
                ended.__context__ = None
                del requests, context
                raise ended.with_traceback(None) from None

        paced: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            handle, None if is_long else parse, handler.response_serializer
        )
        return paced

    def _answering(self, inner: Any, read: _Read) -> _Serve:
        async def answer(request: Any, context: aio.ServicerContext[Any, Any], call: OpenCall) -> None:
            response = await inner(request, context)
            call.take_message(len(response) if isinstance(response, bytes) else response.ByteSize())
            await context.write(response)

        return self._reading_for(answer, read)

    def _reading(self, inner: Any, read: _Read) -> _Serve:
        """Serves a handler that takes one request and writes its answers to the context."""
        return self._reading_for(lambda request, context, _: inner(request, context), read)

    def _reading_for(self, inner: Callable[[Any, Any, OpenCall], Awaitable[None]], read: _Read) -> _Serve:
        patience = self._settings.first_message_time

        async def serve(_: object, context: aio.ServicerContext[Any, Any], call: OpenCall) -> None:
            request: object = EOF
            try:
                async with asyncio.timeout(patience):
                    request = await read(context, call)
            except TimeoutError:
                text = f"the request did not arrive within {patience:g} s, and other callers need the memory"
                # A worker that was cut off or stopped makes the call again.
                await refuse(context, NoRoom(text), self._vitals)
            if request is EOF:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without a request")
            await inner(request, context, call)

        return serve

    def _merged(self, parse: Any) -> _Read:
        """Reads a request that may come as several messages. Protobuf merges messages whose bytes are joined."""
        most = self._settings.longest_request
        most_items = max(self._settings.max_wait_keys, 4 * (most // MESSAGE_BYTES + 1))

        async def read(context: aio.ServicerContext[Any, Any], call: OpenCall) -> Any:
            data: list[bytes] = []
            size = 0
            while (message := await context.read()) is not EOF:
                size += len(message)
                try:
                    if size > most:
                        raise LimitMet(f"a request of this call has at most {most:,} bytes")
                    call.take_message(len(message))
                except (LimitMet, NoRoom) as refused:
                    data.clear()
                    call.give_back()
                    # Otherwise grpc's client would report that a write failed, but not why.
                    while await context.read() is not EOF:
                        await self._turn(call.payer)
                    await refuse(context, refused, self._vitals)
                data.append(message)
                if len(message) < MESSAGE_BYTES // 2:  # the number of longer ones is bounded by the request's size
                    await self._turn(call.payer)
            if not data:
                return EOF
            request = parse(b"".join(data))
            # Each item takes some 32 bytes, even an empty one that came as 2 bytes: a MiB has half a million of these.
            items = max((len(each) for each in _repeated(request)), default=0)
            if items > most_items:
                del request
                text = f"a request of this call has at most {most_items:,} items, not {items:,}"
                await refuse(context, LimitMet(text), self._vitals)
            return request

        return read

    async def _turn(self, payer: str) -> None:
        """Waits if the payer makes calls, or sends messages of requests, faster than it may."""
        if delay := self._pacers.delay(payer, asyncio.get_running_loop().time()):
            await asyncio.sleep(delay)


def _repeated(request: object) -> Iterator[Sized]:
    """Yields the repeated fields of a request; none if the request could not be parsed."""
    if isinstance(request, Message):
        for _, value in request.ListFields():
            if isinstance(value, MutableSequence):
                yield value


async def _message(context: aio.ServicerContext[Any, Any], call: OpenCall) -> Any:
    """Reads a request that is one message."""
    request: Any = await context.read()
    call.take_message(request.ByteSize() if isinstance(request, Message) else 0)  # others are refused at once
    return request


def _streaming(inner: Any) -> _Serve:
    """Serves a handler of a stream, which uses the context's read and write, or takes requests and yields answers."""

    async def serve(requests: Any, context: aio.ServicerContext[Any, Any], _: OpenCall) -> None:
        await inner(requests, context)

    async def generate(requests: Any, context: aio.ServicerContext[Any, Any], _: OpenCall) -> None:
        async for answer in inner(requests, context):
            await context.write(answer)

    return generate if inspect.isasyncgenfunction(inner) else serve
