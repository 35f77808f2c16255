"""Names cost nothing that lasts: however many jobs have come and gone, the coordinator takes the next one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from paceline_server._grpc import aio
from paceline_server.storage.memory import MemoryStorage
from paceline_server.storage.sqlite import SqliteStorage
from pacelinepb.v1 import admin_pb2, store_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.coordinator import RawSession, run, running

LIMITS = {"max_jobs": 3, "max_resting_jobs": 5}


async def come_and_go(channel: aio.Channel, name: str) -> int:
    """A job of one member, which leaves a key behind; returns its generation."""
    session = await RawSession.register(channel, name, least=1, most=1)
    generation = (await session.view()).generation
    await StoreServiceStub(channel).Set([store_pb2.SetRequest(caller=session.caller, key="k", value=[b"v"])])
    await session.leave()
    return generation


@pytest.mark.parametrize("disk", [True, False])
def test_generations_increase_beyond_the_remembered_job_names(disk: bool, tmp_path: Path) -> None:
    """Also after a restart, and no number of a name is used twice (I3)."""
    memory = MemoryStorage()
    random_names = random.Random(1)
    last: dict[str, int] = {}

    async def main() -> None:
        for _ in range(3):
            storage = SqliteStorage(tmp_path / "state.db") if disk else memory
            async with running(storage, **LIMITS) as channel:
                admin: Any = AdminServiceStub(channel)
                for number in range(40):
                    name = f"job {random_names.randrange(15) if number % 2 else random_names.randrange(1_000)}"
                    generation = await come_and_go(channel, name)
                    assert generation > last.get(name, 0)
                    last[name] = generation
                listed = await admin.ListJobs(admin_pb2.ListJobsRequest())
                assert len(listed.jobs) == LIMITS["max_resting_jobs"]
        storage = SqliteStorage(tmp_path / "state.db") if disk else memory
        left = await storage.load()
        await storage.close()
        assert len(left) == LIMITS["max_resting_jobs"] + 1, "and what is known of all others, in one place"
        assert not any(job.keys for job in left)

    run(main)


def test_a_claimed_generation_floor_affects_only_its_job() -> None:
    """Else all jobs would begin at a number above which there are none."""

    async def main() -> None:
        async with running(**LIMITS) as channel:
            liar = await RawSession.register(channel, "liar", least=1, most=1, generation_floor=(1 << 62) - 1)
            assert (await liar.view()).generation == 1 << 62
            await liar.leave()
            for number in range(10):
                assert await come_and_go(channel, f"job {number}") < 10

    run(main)


def test_candidates_that_leave_before_a_view_leave_nothing() -> None:
    async def main() -> None:
        storage = MemoryStorage()
        async with running(storage, **LIMITS) as channel:
            for number in range(20):
                session = await RawSession.register(channel, f"job {number}")
                await StoreServiceStub(channel).Set(
                    [store_pb2.SetRequest(caller=session.caller, key="k", value=[b"v"])]
                )
                await session.leave()
            admin: Any = AdminServiceStub(channel)
            assert not (await admin.ListJobs(admin_pb2.ListJobsRequest())).jobs
        assert not await storage.load()

    run(main)
