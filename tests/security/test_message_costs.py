"""A message costs its reader what its bytes cost, whatever they say; too much in a field costs its sender only.

Work is counted in calls of functions and in bytes that are allocated, so that it is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from security.work import Work, counted
from unit.protos.bounds import BOUNDS, methods, too_long

from paceline_server._grpc import aio
from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import Refused
from paceline_server.services.admin import AdminHandlers
from paceline_server.services.reading import check_readable
from paceline_server.services.session import SessionHandlers
from paceline_server.services.store import StoreHandlers
from paceline_server.settings import ServerSettings
from paceline_server.storage.memory import MemoryStorage
from paceline_server.streams import SessionStream
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.pieces import MESSAGE_BYTES, in_messages
from pacelinepb.v1 import admin_pb2, peer_pb2
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import RawSession, duration, reason_of, refused, run, running
from support.grpc_pair import JOB, grpc_world

FAR = (1 << 62) - 1


class Served:
    """A dispatcher and the handlers of all its services, without a socket, and a job with one member in its view."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(ServerSettings(settle_time=1e-9), MemoryStorage())
        self.sessions = SessionHandlers(self.dispatcher)
        self.handlers: dict[str, Any] = {
            "SessionService": self.sessions,
            "StoreService": StoreHandlers(self.dispatcher),
            "AdminService": AdminHandlers(self.dispatcher),
        }

    def register(self, most: int) -> SessionStream:
        register = pb.Register(
            job="job",
            protocol_version=PROTOCOL_VERSION,
            process=pb.ProcessIdentity(host="host", pid=1),
            address="host:1",
            settings=pb.JobSettings(min_workers=1, max_workers=most, failure_timeout=duration(3_600)),
        )
        return self.dispatcher.register(register)

    async def member(self, most: int = 1) -> SessionStream:
        stream = self.register(most)
        async with aclosing(stream.messages()) as messages:
            async for message in messages:
                if message.HasField("view_formed"):
                    break
        return stream

    def take(self, stream: SessionStream, data: bytes) -> None:
        self.sessions._take(stream, check_readable(pb.SessionRequest.FromString(data)))


def counting(main: Callable[[Served], Awaitable[None]]) -> None:
    async def served() -> None:
        there = Served()
        await there.dispatcher.start()
        try:
            await main(there)
        finally:
            there.dispatcher.drain()

    run(served)


def is_cheap(work: Work, data: bytes) -> bool:
    """True if it is in proportion to the bytes that came, beside what any message costs."""
    return work.calls <= 1_000 + 6 * len(data) and work.memory <= (64 << 10) + 64 * len(data)


def shares(count: int, parts: Callable[[int], int]) -> list[pb.Share]:
    return [pb.Share(part=0, parts=parts(number)) for number in range(count)]


MEETS = {
    "as many cuts as shares": pb.Meet(generation=1, tag=pb.Tag(), node_size=0, shares=shares(64, lambda n: 65_536 - n)),
    "one cut": pb.Meet(generation=1, tag=pb.Tag(), node_size=0, shares=shares(64, lambda n: 65_536)),
    "a great node": pb.Meet(generation=1, tag=pb.Tag(), node_size=65_536, shares=shares(64, lambda n: 65_536)),
    "a step to finish": pb.Meet(
        generation=1, tag=pb.Tag(), prepared=pb.Tag(generation=FAR), node_size=0, shares=shares(1, lambda n: 65_536)
    ),
}


@pytest.mark.parametrize("which", MEETS)
def test_a_meet_message_with_many_state_parts_is_cheap(which: str) -> None:
    """64 shares of 65,536 parts each made the coordinator build 4 million parts: 30 s and 416 MiB for 430 bytes."""

    async def main(served: Served) -> None:
        stream = await served.member(most=65_536)
        data = pb.SessionRequest(meet=MEETS[which]).SerializeToString()
        assert len(data) < 512
        with counted() as work:
            served.take(stream, data)
        assert "of the state of step 0 is lost" in served.dispatcher.jobs["job"].membership.decision.reason
        assert is_cheap(work, data), work

    counting(main)


def filled(message: Any) -> Any:
    """The message with every field as long as it may be, and every number as great, within one message's bytes."""
    for field in message.DESCRIPTOR.fields:
        name = f"{message.DESCRIPTOR.name}.{field.name}"
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        most, each = BOUNDS.get(name, 1), BOUNDS.get(name + "[]", 1)
        if field.containing_oneof is not None and message.WhichOneof(field.containing_oneof.name):
            continue
        if is_map:
            for number in range(most):
                getattr(message, field.name)[f"{number:0{each}d}"] = FAR
        elif field.message_type is not None and field.message_type.full_name.startswith("google."):
            getattr(message, field.name).FromSeconds(59)
        elif field.message_type is not None and field.is_repeated:
            for _ in range(most):
                filled(getattr(message, field.name).add())
        elif field.message_type is not None:
            filled(getattr(message, field.name))
        elif field.is_repeated:
            each = min(each, max(1, 8_000 // most))
            entry = {field.TYPE_STRING: "x" * each, field.TYPE_BYTES: bytes(each)}.get(field.type, 1)
            getattr(message, field.name).extend([entry] * most)
        else:
            value = {
                field.TYPE_STRING: "x" * most,
                field.TYPE_BYTES: bytes(most),
                field.TYPE_BOOL: True,
                field.TYPE_ENUM: int(ErrorReason.ERROR_REASON_PEER_LOST) if message.DESCRIPTOR.name == "Report" else 1,
                field.TYPE_UINT64: FAR,
            }.get(field.type, 65_535)
            setattr(message, field.name, value)
    return message


EVENTS = [field.name for field in pb.SessionRequest.DESCRIPTOR.oneofs_by_name["event"].fields]


@pytest.mark.parametrize("event", EVENTS)
def test_the_longest_session_messages_are_cheap_to_handle(event: str) -> None:
    async def main(served: Served) -> None:
        stream = await served.member(most=65_536)
        message = pb.SessionRequest()
        filled(getattr(message, event))
        data = message.SerializeToString()
        assert len(data) <= MESSAGE_BYTES
        with counted() as work, suppress(Refused):
            message = check_readable(pb.SessionRequest.FromString(data))
            if event in ("register", "resume"):
                getattr(served.dispatcher, event)(getattr(message, event))
            else:
                served.sessions._take(stream, message)
        assert is_cheap(work, data), (len(data), work)

    counting(main)


class Written:
    """A call that takes answers."""

    async def write(self, message: object) -> None: ...


CALLS = [method for method in methods() if method.containing_service.name != "PeerService" and method.name != "Session"]
SNAKE = {"GetView": "get_view", "ReportExit": "report_exit", "AnswerAsk": "answer_ask"}


@pytest.mark.parametrize("method", CALLS, ids=lambda method: method.name)
@pytest.mark.parametrize("of_member", [True, False])
def test_the_longest_requests_are_cheap_to_handle(method: Any, of_member: bool) -> None:
    """Of a member that is known, as far as names go, and of one that is not."""

    async def main(served: Served) -> None:
        stream = await served.member()
        request = filled(GetMessageClass(method.input_type)())
        if of_member:
            known = {"job": "job", "member_id": stream.member_id}
            for holder in (request, getattr(request, "caller", request)):
                for name, value in known.items():
                    if name in holder.DESCRIPTOR.fields_by_name:
                        setattr(holder, name, value)
        handler = served.handlers[method.containing_service.name]
        serve = getattr(handler, SNAKE.get(method.name, method.name))
        data = request.SerializeToString()
        with counted() as work, suppress(Refused):
            await serve(check_readable(type(request).FromString(data)), Written())
        assert is_cheap(work, data), (len(data), work)

    counting(main)


# What is too much ---------------------------------------------------------------------------------------------------

CUT = {"Heartbeat.doing", "Heartbeat.part", "Report.text", "Leave.cause", "ReportExitRequest.output"}
"""Texts for people: the rest is cut off."""


class Neighbour:
    """Another job, which meets at barriers."""

    @classmethod
    async def of(cls, channel: aio.Channel) -> Neighbour:
        neighbour = cls()
        neighbour.members = [
            await RawSession.register(channel, "good", host=f"host-{name}", failure_timeout=60.0) for name in "ab"
        ]
        neighbour.round = 0
        for member in neighbour.members:
            await member.view()
        return neighbour

    members: list[RawSession]
    round: int

    async def goes_on(self) -> None:
        for member in self.members:
            await member.enter_barrier("step", self.round)
        for member in self.members:
            await member.barrier_passed()
        self.round += 1


def test_an_oversized_field_in_a_session_message_affects_only_its_sender() -> None:
    async def main() -> None:
        async with running() as channel:
            good = await Neighbour.of(channel)
            tried = set()
            for number, (name, message) in enumerate(too_long(pb.SessionRequest.DESCRIPTOR)):
                event = message.WhichOneof("event")
                if name in CUT or len(message.SerializeToString()) > MESSAGE_BYTES - 16:
                    continue
                tried.add(name)
                if event in ("register", "resume"):
                    bad = RawSession(channel, "bad")
                    full = pb.SessionRequest(register=_register()) if event == "register" else pb.SessionRequest()
                    getattr(full, event).protocol_version = PROTOCOL_VERSION
                    full.MergeFrom(message)
                    message = full
                else:
                    bad = await RawSession.register(channel, f"bad {number}", least=1, most=1, failure_timeout=60.0)
                    await bad.view()
                await bad.send(**{event: getattr(message, event)})
                if name == "EnterBarrier.name":
                    failed = await bad.next("barrier_failed")
                    assert "the name of a barrier must have 1 to 256 bytes" in failed.text
                    await bad.leave()
                else:
                    error = await refused(bad)
                    assert reason_of(error) in ("LIMIT", "BAD_REQUEST"), name
                    assert "must" in (error.details() or "") or "at most" in (error.details() or ""), name
                    bad.call.cancel()
                await good.goes_on()
            assert {"Meet.shares", "Register.job", "Resume.session_token", "Heartbeat.sent_bytes[]"} <= tried

    run(main)


def _register() -> pb.Register:
    settings = pb.JobSettings(min_workers=1, max_workers=1, failure_timeout=duration(3.0))
    process = pb.ProcessIdentity(host="h", pid=1)
    return pb.Register(job="bad", process=process, address="h:1", settings=settings)


NUMBERS = {
    "a state in more parts than the job has members": pb.SessionRequest(
        meet=pb.Meet(generation=1, tag=pb.Tag(), node_size=0, shares=[pb.Share(part=0, parts=5)])
    ),
    "a node of more members than the job has": pb.SessionRequest(meet=pb.Meet(generation=1, node_size=5)),
    "shares of two cuts": pb.SessionRequest(
        meet=pb.Meet(generation=1, node_size=2, shares=[pb.Share(part=0, parts=2), pb.Share(part=0, parts=3)])
    ),
    "no such part": pb.SessionRequest(meet=pb.Meet(generation=1, node_size=0, shares=[pb.Share(part=2, parts=2)])),
    "a generation that none can follow": pb.SessionRequest(
        meet=pb.Meet(generation=1, tag=pb.Tag(generation=(1 << 63) - 1))
    ),
    "a step that cannot be stored": pb.SessionRequest(finish=pb.Finish(generation=1, step=(1 << 64) - 1)),
}


@pytest.mark.parametrize("which", NUMBERS)
def test_a_too_large_number_ends_only_that_session(which: str) -> None:
    async def main() -> None:
        async with running() as channel:
            good = await Neighbour.of(channel)
            bad = await RawSession.register(channel, "bad", least=1, most=4)
            await bad.view()
            (event,) = (field.name for field, _ in NUMBERS[which].ListFields())
            await bad.send(**{event: getattr(NUMBERS[which], event)})
            assert reason_of(await refused(bad)) == "BAD_REQUEST"
            await good.goes_on()

    run(main)


def test_resume_with_a_generation_out_of_range_is_refused() -> None:
    async def main() -> None:
        async with running() as channel:
            good = await Neighbour.of(channel)
            bad = await RawSession.register(channel, "bad", least=1, most=1)
            await bad.view()
            with pytest.raises(aio.AioRpcError, match=r"resume.generation must be below 2\^62"):
                await RawSession.resume(channel, bad, (1 << 64) - 1)
            await good.goes_on()
            listed = await channel.unary_unary(
                "/pacelinepb.v1.AdminService/ListJobs",
                request_serializer=admin_pb2.ListJobsRequest.SerializeToString,
                response_deserializer=admin_pb2.ListJobsResponse.FromString,
            )(admin_pb2.ListJobsRequest())
            assert [job.name for job in listed.jobs] == ["bad", "good"]

    run(main)


def test_list_jobs_caps_counters_whose_sum_overflows() -> None:
    async def main(served: Served) -> None:
        for _ in range(5):
            beat = pb.Heartbeat(samples=FAR, committed=FAR, undone=FAR, step=FAR, sent_bytes={"tcp": FAR})
            served.take(served.register(9), pb.SessionRequest(heartbeat=beat).SerializeToString())
        listed = await served.handlers["AdminService"].ListJobs(admin_pb2.ListJobsRequest())
        assert listed.jobs[0].totals.samples == (1 << 64) - 1
        assert listed.jobs[0].totals.sent_bytes["tcp"] == (1 << 64) - 1

    counting(main)


async def _refusal(channel: aio.Channel, method: Any, request: Message) -> aio.AioRpcError:
    asked, answered = ("stream" if each else "unary" for each in (method.client_streaming, method.server_streaming))
    make: Any = getattr(channel, f"{asked}_{answered}")
    call = make(
        f"/{method.containing_service.full_name}/{method.name}", request_serializer=type(request).SerializeToString
    )(iter(in_messages(request)) if method.client_streaming else request)
    with pytest.raises(aio.AioRpcError) as caught:
        await (anext(aiter(call)) if method.server_streaming else call)
    return caught.value


def test_an_oversized_field_in_a_request_is_refused() -> None:
    async def main() -> None:
        async with running() as channel:
            good = await Neighbour.of(channel)
            bad = await RawSession.register(channel, "bad", least=1, most=1)
            for method in CALLS:
                for name, message in too_long(method.input_type):
                    if name in CUT:
                        continue
                    request = type(message)(**_valid(message, bad))
                    request.MergeFrom(message)
                    error = await _refusal(channel, method, request)
                    assert reason_of(error) in ("LIMIT", "BAD_REQUEST"), (name, error.details())
                    assert "at most" in (error.details() or "") or "must have" in (error.details() or ""), name
                await good.goes_on()

    run(main)


def _valid(message: Message, session: RawSession) -> dict[str, Any]:
    """What a request must have besides."""
    valid = {
        "caller": session.caller,
        "job": session.job,
        "key": "k",
        "member_id": session.member_id,
        "process": pb.ProcessIdentity(host="h", pid=1),
        "session_token": session.token,
        "timeout": duration(0.0),
        "what": pb.QUESTION_STACKS,
    }
    return {name: value for name, value in valid.items() if name in message.DESCRIPTOR.fields_by_name}


def test_an_oversized_field_in_a_request_to_a_door_is_refused() -> None:
    doors = [method for method in methods() if method.containing_service.name == "PeerService"]
    with grpc_world() as world:
        world.doors[1].window.member_id = "member-1"

        async def main() -> None:
            async with aio.insecure_channel(world.meshes[0].peers[1].address) as channel:
                for method in doors:
                    for name, message in too_long(method.input_type) if method.name != "Frames" else ():
                        known = {"job": JOB, "from_member": "member-0", "to_member": "member-1", "generation": 1}
                        fields = message.DESCRIPTOR.fields_by_name
                        request = type(message)(**{key: known[key] for key in known.keys() & fields.keys()})
                        if isinstance(request, peer_pb2.HelloRequest):
                            request.protocol_version, request.purpose = PROTOCOL_VERSION, peer_pb2.PURPOSE_COLLECTIVE
                        request.MergeFrom(message)
                        error = await _refusal(channel, method, request)
                        assert reason_of(error) in ("LIMIT", "BAD_REQUEST"), (name, error.details())

        run(main)


@pytest.mark.parametrize("chunks", [[0, 0], [1, 0]])
def test_get_state_refuses_repeated_or_unordered_chunks(chunks: list[int]) -> None:
    """Its number takes a byte, and the chunk a MiB."""
    with grpc_world() as world:
        window = world.doors[1].window
        window.member_id, window.source = "member-1", object()  # type: ignore[assignment]  # nothing is read of it
        (method,) = (method for method in methods() if method.name == "GetState")

        async def main() -> None:
            async with aio.insecure_channel(world.meshes[0].peers[1].address) as channel:
                request = peer_pb2.GetStateRequest(job=JOB, to_member="member-1", chunks=chunks)
                error = await _refusal(channel, method, request)
                assert reason_of(error) == "BAD_REQUEST"
                assert error.details() == "the numbers of chunks must ascend"

        run(main)
