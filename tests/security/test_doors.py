"""A worker's door, for somebody who knows its address and all member ids, from logs or `paceline status`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import paceline
from paceline._base.proofs import METADATA, DoorKey
from paceline._base.rpc import aio, error_from_status, grpc
from paceline._base.waits import loop_thread
from paceline.credentials import IN_THE_CLEAR, Credentials
from paceline.testing import coordinator
from paceline_server import Coordinator, ServerSettings
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.v1 import admin_pb2, peer_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub
from support.coordinator import RawSession, run
from support.http2 import END_HEADERS, END_STREAM, HEADERS, call_headers, connect, frame, open_call
from support.processes import Worker

JOB = "job"
METHODS = [method for method in peer_pb2.DESCRIPTOR.services_by_name["PeerService"].methods if method.name != "Frames"]
"""Frames has a ticket, which Hello gives once."""

MEMBER = """
from paceline import nn
session = paceline.join(job="job")
session.group.all_reduce(np.ones(3))
emit("in", secret=session._connection.door_key._secret.hex())
wait_for_go()
session.leave()
"""


@dataclass(frozen=True)
class Place:
    """A coordinator with a job of two members, and who they are: what its list of members has."""

    coordinator: str
    members: tuple[Any, ...]
    secret: bytes

    def request(self, method: Any) -> Any:
        """What a member would send to the second one."""
        made = getattr(peer_pb2, method.input_type.name)(job=JOB, to_member=self.members[1].member_id)
        if method.name == "Hello":
            made.protocol_version, made.generation, made.purpose = PROTOCOL_VERSION, 1, peer_pb2.PURPOSE_POINT_TO_POINT
            made.offered.append(peer_pb2.LINK_KIND_GRPC)
        if method.name in ("Hello", "Knock"):
            made.from_member = self.members[0].member_id
        return made

    def call(self, method: Any, proof: bytes | None, credentials: Credentials = IN_THE_CLEAR) -> Any:
        """How the second member's door answers; None if it does as it is told."""

        async def main() -> aio.AioRpcError | None:
            metadata = None if proof is None else [(METADATA, proof)]
            async with credentials.member_channel(self.members[1].address, ()) as channel:
                call = getattr(PeerServiceStub(channel), method.name)(
                    self.request(method), metadata=metadata, timeout=10
                )
                try:
                    if method.server_streaming:
                        async for _ in call:
                            pass
                    else:
                        await call
                except aio.AioRpcError as error:
                    return error
                return None

        return loop_thread().run(main())

    def secret_of(self, job: str) -> bytes:
        """What somebody hears who comes into a job of this coordinator, as whoever has its token may."""

        async def main() -> bytes:
            async with aio.insecure_channel(self.coordinator) as channel:
                session = await RawSession.register(channel, job)
                await session.leave()
                return session.door_secret

        return loop_thread().run(main())


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with _members() as made:
        yield made


@contextmanager
def _members() -> Iterator[Place]:
    with coordinator() as address:
        where = {"PACELINE_COORDINATOR": address, "PACELINE_MIN_WORKERS": "2"}
        workers = [Worker(MEMBER, where) for _ in range(2)]
        try:
            (secret,) = {bytes.fromhex(worker.expect("in")["secret"]) for worker in workers}
            with grpc.insecure_channel(address) as channel:
                detail = AdminServiceStub(channel).GetJob(admin_pb2.GetJobRequest(job=JOB), timeout=10)
            members = sorted((status.member for status in detail.members), key=lambda member: member.rank)
            yield Place(address, tuple(members), secret)
            for worker in workers:
                worker.go()
            assert [worker.wait() for worker in workers] == [0, 0]
            assert [worker.stderr for worker in workers] == ["", ""]
        finally:
            for worker in workers:
                worker.close()


def refused(error: aio.AioRpcError | None, words: str) -> None:
    assert error is not None
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert words in str(error_from_status(error, "the door"))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_member_ids_without_the_jobs_secret_are_refused(place: Place, method: Any) -> None:
    """Without the job's secret, with one of another job at the same coordinator, and with what was overheard."""
    words = "the caller does not prove that it belongs to this job"
    request, first = place.request(method), place.members[0].member_id
    refused(place.call(method, None), words)
    for secret in (bytes(32), place.secret_of("another")):
        stranger = DoorKey()
        stranger.learn(secret, first)
        refused(place.call(method, stranger.prove(request)), words)
    member = DoorKey()
    member.learn(place.secret, f"one for {method.name}")
    credentials = Credentials(door_key=member)
    for proof in (None, member.prove(request)):
        error = place.call(method, proof, IN_THE_CLEAR if proof else credentials)
        assert error is None or error.code() is grpc.StatusCode.FAILED_PRECONDITION, error  # "it has no state yet"
    refused(place.call(method, proof), "this call was made before")


@pytest.mark.parametrize("whose", ["coordinator", "member"])
def test_a_method_name_that_is_not_utf_8_does_not_stop_the_server(place: Place, whose: str) -> None:
    """grpcio 1.84.0 to 1.85.3 stops to listen, and says nothing."""
    address = place.coordinator if whose == "coordinator" else place.members[1].address
    named = frame(HEADERS, END_HEADERS | END_STREAM, 3, call_headers("/paceline.v1.Session/Unknown"))
    for path in (b"/paceline.v1.Ses\xc1ion/Session", b"/paceline.v1.Session/Unknown"):
        with connect(address) as caller, caller.makefile("rb") as heard:
            caller.sendall(open_call(path) + named)
            answered = False
            while not answered:
                head = heard.read(9)
                assert len(head) == 9, "the port was closed"
                heard.read(int.from_bytes(head[:3], "big"))
                answered = head[3:5] == bytes([HEADERS, END_HEADERS | END_STREAM]) and head[8] == 3


def test_the_secret_of_an_earlier_line_is_refused() -> None:
    """The next line is of a member that had the same secret, as a candidate."""
    began = asyncio.Queue[str]()

    def observe(what: str, member_id: str, _: float) -> None:
        if what == "stream_began":
            began.put_nowait(member_id)

    async def knock(there: Any, secret: bytes) -> aio.AioRpcError | None:
        key = DoorKey()
        key.learn(secret, "a member")
        request = peer_pb2.KnockRequest(job=JOB, from_member="a member", to_member=there.member_id)
        async with Credentials(door_key=key).member_channel(there.address, ()) as door:
            try:
                await PeerServiceStub(door).Knock(request, timeout=10)
            except aio.AioRpcError as error:
                return error
            return None

    async def main() -> None:
        coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0"), observer=observe)
        join = functools.partial(paceline.join, await coordinator.start(), job=JOB, min_workers=1, max_workers=1)
        first = await asyncio.to_thread(join)
        old = first._connection.door_key._secret
        joins = asyncio.create_task(asyncio.to_thread(join))
        assert await began.get() != await began.get()
        await asyncio.to_thread(first.leave)
        second = await joins
        there, new = second._connection.mesh.peers[0], second._connection.door_key._secret
        refused(
            await knock(there, old),
            "the caller does not prove that it belongs to this job, or its proof is out of date",
        )
        assert await knock(there, new) is None
        await asyncio.to_thread(second.leave)
        await coordinator.stop(grace=0.2)

    run(main)
