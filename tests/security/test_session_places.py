"""One token does not take all places for sessions, and a member that has hung up keeps its own for a bounded time."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline_server import Coordinator, ServerSettings
from paceline_server._grpc import aio
from paceline_server.storage.memory import MemoryStorage
from pacelinepb.v1 import admin_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from support.coordinator import PATIENCE, RawSession, reason_of, run, running

MINE, THEIRS, OPERATOR = (
    "a-token-for-the-neighbour-0123",
    "a-token-for-the-attacker-01234",
    "a-token-of-the-operator-0123",
)

PLACES = 24


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text(f"{MINE} mine\n{THEIRS} theirs\n{OPERATOR}\n")
    return path


async def filled(channel: aio.Channel, token: str, *jobs: str, **fields: Any) -> list[RawSession]:
    """Opens sessions in these jobs, in turn, until each is refused."""
    sessions: list[RawSession] = []
    left = list(jobs)
    while left:
        for job in list(left):
            most: Any = {"least": PLACES, "most": PLACES, **fields}
            try:
                sessions.append(await RawSession.register(channel, job, pid=len(sessions) + 1, token=token, **most))
            except aio.AioRpcError as error:
                if reason_of(error) != "LIMIT":
                    raise
                left.remove(job)
    return sessions


def test_one_token_takes_at_most_half_of_the_places(tokens: Path) -> None:
    """Its job, and the job of its launchers, each have a limit that is a half of all places."""

    async def main() -> None:
        async with running(token_file=tokens, max_sessions=PLACES, max_job_sessions=PLACES // 2) as channel:
            assert len(await filled(channel, THEIRS, "theirs", "theirs/nodes")) == PLACES // 2
            assert len(await filled(channel, MINE, "mine")) == PLACES // 4

    run(main)


def test_restored_sessions_still_take_their_places_after_a_restart(tokens: Path) -> None:
    """It restores the sessions of members, and their token is not known then."""

    async def main() -> None:
        storage, limits = MemoryStorage(), {"token_file": tokens, "max_sessions": PLACES}
        async with running(storage, **limits) as channel:
            half = PLACES // 2
            taken = await filled(channel, THEIRS, "theirs", least=half, most=half)
            assert (await taken[0].view()).generation == 1
        async with running(storage, **limits) as channel:
            assert await filled(channel, THEIRS, "theirs", "theirs/nodes") == []
            assert len(await filled(channel, MINE, "mine")) == PLACES // 4

    run(main)


async def until_empty(channel: aio.Channel, job: str) -> None:
    """Waits until a job has no sessions."""
    admin = AdminServiceStub(channel)
    shown = aio.Metadata(("authorization", f"Bearer {OPERATOR}"))
    async with asyncio.timeout(2 * PATIENCE):
        while (await admin.GetJob(admin_pb2.GetJobRequest(job=job), metadata=shown)).members:
            pass


async def hung_up(tokens: Path, max_silence: float, own: bool) -> None:
    """A member of a view hangs up without a goodbye; returns when its session has ended."""
    settings = ServerSettings(listen="127.0.0.1:0", token_file=tokens, max_silence=max_silence)
    coordinator = Coordinator(settings)
    address = await coordinator.start()
    try:
        with closing(socket.create_server(("127.0.0.1", 0))) as theirs:
            port = int(address.rpartition(":")[2]) if own else theirs.getsockname()[1]
            where: Any = {"host": "127.0.0.1", "pid": port, "failure_timeout": max_silence}
            async with aio.insecure_channel(address) as channel:
                await (await RawSession.register(channel, "theirs", least=1, most=1, token=THEIRS, **where)).view()
            async with aio.insecure_channel(address) as channel:
                await until_empty(channel, "theirs")
    finally:
        await coordinator.stop(grace=0.2)


def test_the_coordinators_own_address_holds_no_place_for_a_member(tokens: Path) -> None:
    """Somebody listens there, but no member."""
    run(lambda: hung_up(tokens, 86_400.0, own=True))


def test_a_listening_address_holds_a_place_for_the_allowed_time(tokens: Path) -> None:
    run(lambda: hung_up(tokens, 0.5, own=False))


def test_a_failure_timeout_above_the_maximum_is_refused(tokens: Path) -> None:
    async def main() -> None:
        async with running(token_file=tokens) as channel:
            with pytest.raises(aio.AioRpcError) as caught:
                await RawSession.register(channel, "theirs", token=THEIRS, failure_timeout=3_601.0)
            assert caught.value.details() == (
                "settings.failure_timeout must be 0.05 to 3600 s at this coordinator, not 3601 s: set "
                "PACELINE_FAILURE_TIMEOUT to such a time, or start the coordinator with another --max-silence"
            )

    run(main)
