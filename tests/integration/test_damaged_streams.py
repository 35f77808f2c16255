"""A session's stream that makes no sense is resumed like one that broke; a refusal is believed when it is repeated."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from paceline import errors
from paceline._base.addresses import CoordinatorAddresses
from paceline._session.control import ControlStream
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from paceline_protocol.messages import Waiting
from paceline_server._grpc import aio, grpc
from paceline_server.errors import BadRequest, Refused, SessionEnded
from paceline_server.services.refusals import refuse
from paceline_server.vitals import Vitals
from pacelinepb import checks
from pacelinepb.v1 import session_pb2 as pb
from support.coordinator import RawSession, reason_of, refused, run, running

REGISTERED = pb.SessionResponse(
    # No heartbeat comes: grpc forgets why a stream ended if a write fails just then.
    registered=pb.Registered(member_id="m", session_token=b"secret", heartbeat_interval=Duration(seconds=3600))
).SerializeToString()
WAITING = pb.SessionResponse(waiting=pb.Waiting(reason="for others")).SerializeToString()

Stream = Callable[[Any], Awaitable[None]]
"""Serves one stream, given its context."""


class Heard:
    """A listener that notes what it hears."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[tuple[str, object]] = asyncio.Queue()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *said: self.news.put_nowait((name, said[0] if said else None))

    async def on_away(self, timeout: float) -> str:
        return ""

    async def until(self, wanted: str) -> object:
        """Waits for this; returns what came with it."""
        while True:
            name, said = await asyncio.wait_for(self.news.get(), 10.0)
            if name == wanted:
                return said
            assert name != "on_ended", said


class Scripted:
    """A server that serves one stream after another as it is told.

    Attributes:
        firsts: the first message of each stream that came.
    """

    def __init__(self, *streams: Stream) -> None:
        self._streams = list(streams)
        self.firsts: list[pb.SessionRequest] = []

    async def serve(self, _: object, context: Any) -> None:
        """Serves the next stream."""
        self.firsts.append(pb.SessionRequest.FromString(await context.read()))
        await self._streams.pop(0)(context)

    def play(self, follow: Callable[[ControlStream, Heard], Awaitable[None]]) -> None:
        """Has a client open its session here, and follows it."""

        async def main() -> None:
            server = aio.server()
            handlers = {"Session": grpc.stream_stream_rpc_method_handler(self.serve)}
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler("pacelinepb.v1.SessionService", handlers),)
            )
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            heard: Any = Heard()
            config = dataclasses.replace(Config(), failure_timeout=30.0)  # a stream that ends within 5 s is short
            register = pb.Register(job="job")
            stream = ControlStream(
                CoordinatorAddresses.parse(f"127.0.0.1:{port}"), register, config, heard, pb.Heartbeat, IN_THE_CLEAR
            )
            try:
                await follow(stream, heard)
            finally:
                stream._left.set()
                await stream.leave("", 0.0)
                await server.stop(None)

        run(main)


async def good(context: Any) -> None:
    """Answers, and says one thing more; then the stream stays."""
    await context.write(checks.with_check(REGISTERED, 0))
    await context.write(checks.with_check(WAITING, 1))
    await asyncio.sleep(60)


async def garbage(context: Any) -> None:
    """Answers with bytes that are no message."""
    await context.write(b"\xff" * 20)
    await asyncio.sleep(60)


async def changed(context: Any) -> None:
    """Answers, and then a byte changes on the way in a message that still is one."""
    await context.write(checks.with_check(REGISTERED, 0))
    await context.write(checks.with_check(WAITING, 1).replace(b"others", b"ethers"))
    await asyncio.sleep(60)


async def lost(context: Any) -> None:
    """Answers, and then a message is lost on the way."""
    await context.write(checks.with_check(REGISTERED, 0))
    await context.write(checks.with_check(WAITING, 2))
    await asyncio.sleep(60)


def refusing(refusal: Refused, *, first: bool = True) -> Stream:
    """Refuses: the first message, or what comes behind it."""

    async def stream(context: Any) -> None:
        if not first:
            await context.write(checks.with_check(REGISTERED, 0))
        await refuse(context, refusal, Vitals())

    return stream


def kinds(server: Scripted) -> list[str | None]:
    return [first.WhichOneof("event") for first in server.firsts]


@pytest.mark.parametrize("broken", [changed, lost])
def test_a_changed_or_lost_coordinator_message_resumes_the_stream(broken: Stream) -> None:
    server = Scripted(broken, good)

    async def follow(stream: ControlStream, heard: Heard) -> None:
        await stream.open(10.0)
        assert await heard.until("on_message") == Waiting("for others")

    server.play(follow)
    assert kinds(server) == ["register", "resume"]


def test_register_is_retried_after_a_garbled_answer() -> None:
    server = Scripted(garbage, refusing(BadRequest("what?")), good)

    async def follow(stream: ControlStream, heard: Heard) -> None:
        await stream.open(10.0)
        assert await heard.until("on_message") == Waiting("for others")

    server.play(follow)
    assert kinds(server) == ["register"] * 3


def test_register_fails_after_three_refusals() -> None:
    server = Scripted(*[refusing(BadRequest("the job's name is too long"))] * 3)

    async def follow(stream: ControlStream, _: Heard) -> None:
        with pytest.raises(errors.PacelineError, match="too long"):
            await stream.open(10.0)

    server.play(follow)
    assert not server._streams


def test_a_refused_message_or_resume_is_retried() -> None:
    server = Scripted(
        refusing(BadRequest("a meeting after generation 4"), first=False),
        refusing(SessionEnded("there is no job jbo")),
        good,
    )

    async def follow(stream: ControlStream, heard: Heard) -> None:
        await stream.open(10.0)
        await heard.until("on_reconnected")
        await heard.until("on_message")

    server.play(follow)
    assert kinds(server) == ["register", "resume", "resume"]


@pytest.mark.parametrize("first", [False, True], ids=["what follows", "resume"])
def test_repeated_refusals_end_the_session_with_the_first_one(first: bool) -> None:
    last = [refusing(SessionEnded(f"the session has ended ({n})"), first=first) for n in (2, 3)]
    server = Scripted(refusing(SessionEnded("the session has ended (1)"), first=False), *last)

    async def follow(stream: ControlStream, heard: Heard) -> None:
        stream.generation = 1  # a member, which does not come back as another one
        await stream.open(10.0)
        while (news := await asyncio.wait_for(heard.news.get(), 10.0))[0] != "on_ended":
            pass
        assert isinstance(news[1], errors.SessionClosed)
        assert str(news[1]) == "the session has ended (1)"

    server.play(follow)
    assert not server._streams


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_worker_message_out_of_sequence_is_refused_as_damaged(place: int) -> None:
    async def main() -> None:
        async with running() as channel:
            session = await RawSession.register(channel)
            session.place = place
            await session.send(leave=pb.Leave())
            if place == 1:
                await session.next("left")
            else:
                error = await refused(session)
                assert (reason_of(error), error.code()) == ("DAMAGED", grpc.StatusCode.DATA_LOSS)

    run(main)


@pytest.mark.parametrize("at", [-6, -5, -1], ids=["key", "key's second byte", "check"])
def test_a_damaged_check_field_in_register_is_refused_as_damaged(at: int) -> None:
    class Damaging(RawSession):
        def _serialized(self, message: pb.SessionRequest) -> bytes:
            data = bytearray(super()._serialized(message))
            data[at] ^= 1
            return bytes(data)

    async def main() -> None:
        async with running() as channel:
            with pytest.raises(aio.AioRpcError) as refusal:
                await Damaging.register(channel)
            assert reason_of(refusal.value) == "DAMAGED"

    run(main)
