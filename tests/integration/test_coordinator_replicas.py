"""A real coordinator, and ranks of replicas on raw stubs: what each is told of its line, and what an operator sees."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from paceline_server._grpc import aio, grpc
from pacelinepb.status_json import job_as_dict
from pacelinepb.v1 import admin_pb2, session_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from support.coordinator import RawSession, reason_of, refused, run, running


async def rank(channel: aio.Channel, name: str, **fields: Any) -> RawSession:
    """The rank "b1" is that at position 1 of replica b."""
    fields = {"replica_id": name[0], "position": int(name[1:]), "host": f"host-{name}", "replica_size": 2, **fields}
    return await RawSession.register(channel, **fields)


async def two_replicas(channel: aio.Channel) -> dict[str, RawSession]:
    """Two replicas of two ranks in one view."""
    sessions = {name: await rank(channel, name) for name in ("a0", "a1", "b0", "b1")}
    views = {name: await session.view() for name, session in sessions.items()}
    assert {name: (view.rank, view.world_size) for name, view in views.items()} == {
        "a0": (0, 2),
        "a1": (0, 2),
        "b0": (1, 2),
        "b1": (1, 2),
    }
    for name, session in sessions.items():
        pages = await session.get_pages(views[name], int(name[1]))
        assert hashlib.sha256(pages).digest() == views[name].members_sha256
        members = session_pb2.GetViewResponse.FromString(pages).members
        assert [(member.rank, member.process.host) for member in members] == [
            (0, f"host-a{name[1]}"),
            (1, f"host-b{name[1]}"),
        ]
    return sessions


def test_each_rank_fetches_the_members_with_its_position() -> None:
    async def main() -> None:
        async with running(page_members=1) as channel:
            sessions = await two_replicas(channel)
            with pytest.raises(aio.AioRpcError, match="no position 2") as caught:
                await sessions["a0"].stub.GetView(session_pb2.GetViewRequest(job="job", generation=1, position=2))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(main)


def test_mates_of_a_rank_that_ended_are_refused_with_replica_lost() -> None:
    async def main() -> None:
        async with running() as channel:
            sessions = await two_replicas(channel)
            process = session_pb2.ProcessIdentity(host="host-b1", pid=1)
            await sessions["a0"].stub.ReportExit(
                session_pb2.ReportExitRequest(job="job", process=process, exit_code=-9)
            )
            error = await refused(sessions["b0"])
            assert reason_of(error) == "REPLICA_LOST"
            assert "rank 1 of replica 1 (host-b1, pid 1)" in str(error.details())
            assert list((await sessions["a1"].next("verdict")).culprits) == [1]
            with pytest.raises(aio.AioRpcError) as caught:
                await rank(channel, "b0")
            assert reason_of(caught.value) == "REPLICA_LOST"

    run(main)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"replica_id": ""}, "BAD_REQUEST"),
        ({"replica_id": "two words"}, "BAD_REQUEST"),
        ({"replica_id": "x" * 65}, "LIMIT"),
        ({"replica_size": 70_000}, "BAD_REQUEST"),
        ({"position": 2}, "INVALID_RANK"),
        ({"rank": 0}, "INVALID_RANK"),
    ],
)
def test_a_claim_that_no_replica_can_have_is_refused(fields: dict[str, Any], reason: str) -> None:
    async def main() -> None:
        async with running() as channel:
            with pytest.raises(aio.AioRpcError) as caught:
                await rank(channel, "a0", **fields)
            assert reason_of(caught.value) == reason

    run(main)


def test_an_operator_drains_a_replica_by_its_number_and_sees_its_size() -> None:
    async def main() -> None:
        async with running() as channel:
            sessions = await two_replicas(channel)
            admin: Any = AdminServiceStub(channel)
            told = await admin.DrainMembers(admin_pb2.DrainMembersRequest(job="job", members=["1"]))
            assert set(told.member_ids) == {sessions["b0"].member_id, sessions["b1"].member_id}
            await sessions["b0"].next("drain")
            await sessions["b1"].next("drain")
            told = await admin.DrainMembers(
                admin_pb2.DrainMembersRequest(job="job", members=[sessions["a1"].member_id])
            )
            assert list(told.member_ids) == [sessions["a1"].member_id]
            answer = await admin.GetJob(admin_pb2.GetJobRequest(job="job"))
            assert job_as_dict(answer.summary)["replica_size"] == 2

    run(main)
