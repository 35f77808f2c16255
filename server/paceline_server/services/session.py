"""SessionService: one coroutine writes a session's stream, and one task reads it."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline_protocol.coordinator import (
    BarrierEntered,
    ExitReported,
    FinishedLine,
    Heard,
    LeftJob,
    MetOthers,
    Reported,
)
from paceline_protocol.translation import check_number, read_meet
from paceline_server import wire
from paceline_server._grpc import EOF, aio, grpc
from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import BadRequest, LimitMet, TimedOut
from paceline_server.limits import Pacer
from paceline_server.services.authenticate import jobs_of
from paceline_server.streams import SessionStream
from pacelinepb.v1 import session_pb2 as pb

_Context = aio.ServicerContext[Any, Any]


class SessionHandlers:
    """Handlers of pacelinepb.v1.SessionService."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._settings = dispatcher.settings

    def add_to(self, server: aio.Server) -> None:
        """Registers the handlers by hand, since some handle bytes: pages serialised once, or with a checksum."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Session": grpc.stream_stream_rpc_method_handler(self.session, _as_it_is, _as_it_is),
            "GetView": grpc.unary_unary_rpc_method_handler(self.get_view, pb.GetViewRequest.FromString, _as_it_is),
            "ReportExit": grpc.unary_unary_rpc_method_handler(
                self.report_exit, pb.ReportExitRequest.FromString, pb.ReportExitResponse.SerializeToString
            ),
        }
        handlers["AnswerAsk"] = grpc.unary_unary_rpc_method_handler(  # `PacingInterceptor` merges its messages
            self.answer_ask, pb.AnswerAskRequest.FromString, pb.AnswerAskResponse.SerializeToString
        )
        name = pb.DESCRIPTOR.services_by_name["SessionService"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    async def session(self, requests: object, context: _Context) -> None:
        """Serves the stream of a session."""
        first = await self._first(context)
        event = first.WhichOneof("event") if first is not EOF else None
        if event == "register":
            stream = self._dispatcher.register(first.register, jobs_of(context))
        elif event == "resume":
            stream = self._dispatcher.resume(first.resume)
        else:
            raise BadRequest(f"the first message of a session must be register or resume, not {event or 'nothing'}")
        reader = asyncio.create_task(self._read(stream, context))
        # An exception of the reader (a refusal, or a bug) ends the stream.
        reader.add_done_callback(lambda task: stream.close(None if task.cancelled() else task.exception()))
        try:
            async for message in stream.messages():
                await context.write(message)
        finally:
            reader.cancel()
            self._dispatcher.stream_ended(stream)

    async def _first(self, context: _Context) -> Any:
        try:
            async with asyncio.timeout(self._settings.first_message_time):
                return await context.read()
        except TimeoutError:
            raise TimedOut(f"no first message within {self._settings.first_message_time:g} s") from None

    async def get_view(self, request: pb.GetViewRequest, context: _Context) -> bytes:
        """Returns one page of a view, or the changes since the view that the caller knows."""
        return self._dispatcher.page(
            request.job, request.generation, request.page, request.known_sha256, request.position
        )

    async def report_exit(self, request: pb.ReportExitRequest, context: _Context) -> pb.ReportExitResponse:
        """Handles a launcher's report that a process has ended."""
        event = ExitReported(
            wire.read_process(request.process, self._settings),
            request.exit_code,
            request.found_gone,
            wire.read_launch_id(request.launch_id),
            wire.read_output(request.output),
        )
        return pb.ReportExitResponse(known=self._dispatcher.report_exit(request.job, event))

    async def answer_ask(self, request: pb.AnswerAskRequest, context: _Context) -> pb.AnswerAskResponse:
        """Passes a member's answer on to the operator who has asked."""
        self._dispatcher.authenticate(request.job, request.member_id, request.session_token)
        data = b"".join(request.data)
        if len(data) > (most := self._settings.max_value_bytes):
            raise LimitMet(f"an answer has at most {most} bytes")
        taken = await self._dispatcher.questions.answer(request.member_id, request.ask, data)
        return pb.AnswerAskResponse(taken=taken)

    async def _read(self, stream: SessionStream, context: _Context) -> None:
        """Handles messages until the worker closes its side, no faster than `message_rate`."""
        clock = asyncio.get_running_loop().time
        pacer = Pacer(self._settings.message_rate, self._settings.message_burst, clock())
        while (message := await context.read()) is not EOF:
            if delay := pacer.delay(clock()):
                await asyncio.sleep(delay)
            self._take(stream, message)

    def _take(self, stream: SessionStream, message: pb.SessionRequest) -> None:
        match message.WhichOneof("event"):
            case "heartbeat":
                self._hear(stream, message.heartbeat)
            case "enter_barrier":
                self._enter_barrier(stream, message.enter_barrier)
            case "report":
                report = wire.read_report(message.report, self._settings)
                self._dispatcher.apply_of(stream, Reported(stream.member_id, message.report.generation, report))
            case "meet":
                self._dispatcher.apply_of(stream, MetOthers(stream.member_id, read_meet(message.meet)))
            case "finish":
                finish = message.finish
                step = check_number(finish.step, "finish.step")
                self._dispatcher.apply_of(stream, FinishedLine(stream.member_id, finish.generation, step))
            case "leave":
                if message.leave.HasField("last"):
                    self._hear(stream, message.leave.last)
                cause = wire.cut(message.leave.cause, self._settings.max_text_bytes)
                self._dispatcher.apply_of(stream, LeftJob(stream.member_id, cause))
            case other:
                raise BadRequest(f"a session that is open cannot send {other or 'an empty message'}")

    def _hear(self, stream: SessionStream, heartbeat: pb.Heartbeat) -> None:
        progress = wire.read_progress(asyncio.get_running_loop().time(), heartbeat)
        self._dispatcher.apply_of(stream, Heard(stream.member_id, progress, wire.read_counters(heartbeat)))

    def _enter_barrier(self, stream: SessionStream, message: pb.EnterBarrier) -> None:
        """Enters a barrier. A malformed arrival fails alone and does not end the session."""
        try:
            name = wire.check_name(message.name, "the name of a barrier", self._settings.max_barrier_name_bytes)
            timeout = wire.from_duration(message.timeout, "the timeout of a barrier")
            if not timeout:
                raise BadRequest("a barrier needs a timeout above 0 s")
        except BadRequest as refused:
            failed = pb.BarrierFailed(call=message.call, reason=refused.reason, text=str(refused))
            stream.push(pb.SessionResponse(barrier_failed=failed))
            return
        event = BarrierEntered(stream.member_id, message.call, message.generation, name, message.round, timeout)
        self._dispatcher.apply_of(stream, event)


def _as_it_is(data: bytes) -> bytes:
    return data
