"""Several coordinators in one process, on a shared store without a network: who serves, and who refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from paceline._base.addresses import CoordinatorAddresses
from paceline._session.control import ControlStream
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from paceline_server import ServerSettings
from paceline_server._grpc import aio, grpc
from paceline_server.failover import FailoverCoordinator
from paceline_server.storage.etcd_address import EtcdAddress
from paceline_server.storage.shared_keys import Item
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.v1 import admin_pb2, session_pb2, store_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.coordinator import RawSession, duration, reason_of, run
from support.ports import free_port
from support.shared_keys import MemoryKeys, Node


class Member:
    """One coordinator of several.

    Attributes:
        keys: its client of the store.
        address: where it listens.
    """

    def __init__(self, node: Node) -> None:
        self.keys = MemoryKeys(node)
        self.address = f"127.0.0.1:{free_port()}"
        settings = ServerSettings(listen=self.address, etcd=EtcdAddress(("nowhere:1",), "p"))
        self.coordinator = FailoverCoordinator(settings, keys=self.keys)

    async def leads(self) -> bool:
        """True if its services are served."""
        async with aio.insecure_channel(self.address) as channel:
            asked = health_pb2.HealthCheckRequest(service="pacelinepb.v1.SessionService")
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(asked)
            except aio.AioRpcError:  # it changes what it serves at this moment
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def several(count: int = 2) -> AsyncIterator[list[Member]]:
    """Coordinators on one store; the first one leads."""
    node = Node()
    members = [Member(node) for _ in range(count)]
    try:
        for member in members:
            await member.coordinator.start()
            await until_leads(members[0])
        yield members
    finally:
        for member in members:
            await member.coordinator.stop(grace=0.1)


async def until_leads(member: Member) -> None:
    while not await member.leads():  # noqa: ASYNC110  its own calls take their time
        await asyncio.sleep(0.01)


async def next_of(session: RawSession, kind: str) -> session_pb2.SessionResponse:
    while True:
        message = await session.read()
        if message.WhichOneof("event") == kind:
            return message


def test_a_standby_refuses_and_names_the_leader() -> None:
    async def main() -> None:
        async with several() as (leader, standby), aio.insecure_channel(standby.address) as channel:
            info = ErrorInfo()
            while not info.metadata["leader"]:  # it has yet to see who leads
                with pytest.raises(aio.AioRpcError) as refused:
                    await AdminServiceStub(channel).ListJobs(admin_pb2.ListJobsRequest())
                assert reason_of(refused.value) == "NOT_LEADER"
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                status = rpc_status.from_call(refused.value)  # type: ignore[arg-type]
                assert status is not None
                assert status.details[0].Unpack(info)
            assert info.metadata["leader"] == leader.address
            whole = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert whole.status == health_pb2.HealthCheckResponse.SERVING

    run(main)


def test_each_message_has_the_epoch_and_idle_streams_get_alive() -> None:
    async def main() -> None:
        async with several(1) as (leader,), aio.insecure_channel(leader.address) as channel:
            session = await RawSession.register(channel, least=1, most=1)
            view = await next_of(session, "view_formed")
            assert view.epoch == 1
            assert (await next_of(session, "alive")).epoch == 1
            jobs = await AdminServiceStub(channel).ListJobs(admin_pb2.ListJobsRequest())
            assert (jobs.leader.address, jobs.leader.epoch) == (leader.address, 1)

    run(main)


def test_a_leader_cut_off_from_the_store_is_replaced_with_its_jobs() -> None:
    async def main() -> None:
        async with (
            several() as (old, new),
            aio.insecure_channel(old.address) as first,
            aio.insecure_channel(new.address) as second,
        ):
            session = await RawSession.register(first, least=1, most=1)
            view = (await next_of(session, "view_formed")).view_formed
            await set_key(first, session, b"before")
            old.keys.away = True
            read = asyncio.create_task(get_key(first, session))
            with pytest.raises(aio.AioRpcError):  # its answer would be of the past
                await read
            await until_leads(new)
            again = await RawSession.resume(second, session, generation=view.generation)
            assert (again.member_id, again.door_secret) == (session.member_id, session.door_secret)
            assert await get_key(second, session) == b"before"
            old.keys.away = False
            assert not await old.leads()

    run(main)


def test_a_deposed_leader_answers_not_leader_for_unknown_sessions() -> None:
    """It does not know that the job, or the session, is there at the next leader."""

    async def main() -> None:
        async with several(1) as (leader,), aio.insecure_channel(leader.address) as channel:
            session = await RawSession.register(channel, least=1, most=1)
            await next_of(session, "view_formed")
            forger = store_pb2.Caller(job=session.job, member_id="unknown")
            request = store_pb2.GetRequest(caller=forger, key="k", timeout=duration(5))
            with pytest.raises(aio.AioRpcError) as refused:
                await StoreServiceStub(channel).Get(request)
            assert reason_of(refused.value) == "SESSION_ENDED"
            with pytest.raises(aio.AioRpcError) as ended:
                await RawSession.resume(channel, session, generation=1, member_id="unknown")
            assert reason_of(ended.value) == "SESSION_ENDED"
            leader.keys.away = True
            read, resumed = await asyncio.gather(
                StoreServiceStub(channel).Get(request),
                RawSession.resume(channel, session, generation=1, member_id="unknown"),
                return_exceptions=True,
            )
            assert [reason_of(each) for each in (read, resumed)] == ["NOT_LEADER", "NOT_LEADER"]

    run(main)


def test_leave_is_not_confirmed_while_the_store_is_unreachable() -> None:
    async def main() -> None:
        async with several(1) as (leader,), aio.insecure_channel(leader.address) as channel:
            session = await RawSession.register(channel, least=1, most=1)
            await next_of(session, "view_formed")
            leader.keys.away = True
            await session.send(leave=session_pb2.Leave())
            with pytest.raises(aio.AioRpcError) as ended:
                await next_of(session, "left")
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE  # it says goodbye to the next leader
            leader.keys.away = False
            await until_leads(leader)
            other = await RawSession.register(channel, least=1, most=1, job="other")
            await next_of(other, "view_formed")
            await other.leave()

    run(main)


def test_a_stopped_leader_resigns(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with several() as (old, new):
            await old.coordinator.stop(grace=0.1)
            await until_leads(new)

    with caplog.at_level("INFO", "paceline_server"):
        run(main)
    assert "the leader of epoch 1 has resigned" in caplog.text, "the other did not wait for it to be silent"


def test_a_coordinator_leads_once_it_can_read_the_state(caplog: pytest.LogCaptureFixture) -> None:
    """Its port is free again: it had been bound before the state was read."""

    async def main() -> None:
        node = Node()
        record = b"p/jobs/job/head"
        node.items[record] = Item(record, b"damaged", 1)
        member = Member(node)
        await member.coordinator.start()
        try:
            while "could not serve in epoch 1" not in caplog.text:  # noqa: ASYNC110  it is in another task
                await asyncio.sleep(0.01)
            del node.items[record]
            await until_leads(member)
        finally:
            await member.coordinator.stop(grace=0.1)

    with caplog.at_level("WARNING", "paceline_server"):
        run(main)
    assert "is in use" not in caplog.text


def test_a_candidate_registers_again_at_a_leader_without_its_session() -> None:
    """Candidates are not stored. It hears so three times, and introduces itself anew, without asking others between."""

    async def main() -> None:
        async with several() as (old, new):
            listener: Any = Mock(on_away=AsyncMock(return_value=""))
            register = session_pb2.Register(
                job="job",
                process=session_pb2.ProcessIdentity(host="here", pid=1),
                address="127.0.0.1:1",
                settings=session_pb2.JobSettings(min_workers=2, max_workers=2, failure_timeout=duration(3)),
                protocol_version=PROTOCOL_VERSION,
            )
            addresses = CoordinatorAddresses.parse(f"{old.address},{new.address}")
            stream = ControlStream(addresses, register, Config(), listener, session_pb2.Heartbeat, IN_THE_CLEAR)
            turns, turn, renewed = [], stream._change_coordinator, asyncio.Event()

            async def is_gone() -> bool:
                await until_leads(new)
                return False

            async def turned(deadline: float) -> None:
                await turn(deadline)
                turns.append(str(addresses.current))

            stream._is_gone, stream._change_coordinator = is_gone, turned  # type: ignore[method-assign]
            listener.on_new_session = renewed.set
            await stream.open(5.0)
            await old.coordinator.stop(grace=0.1)
            await renewed.wait()
            assert turns == [new.address]
            await stream.leave("", 1.0)

    run(main)


async def set_key(channel: aio.Channel, session: Any, value: bytes) -> None:
    request = store_pb2.SetRequest(caller=session.caller, key="k", value=[value])
    await StoreServiceStub(channel).Set(iter([request]))  # type: ignore[misc]


async def get_key(channel: aio.Channel, session: Any) -> bytes:
    request = store_pb2.GetRequest(caller=session.caller, key="k", timeout=duration(5))
    answer: store_pb2.GetResponse = await StoreServiceStub(channel).Get(request)
    return answer.value
