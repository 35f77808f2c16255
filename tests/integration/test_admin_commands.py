"""`paceline drain`, `restart` and `status` against a coordinator with members on raw stubs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline_server import Coordinator, ServerSettings
from paceline_server._grpc import aio
from pacelinepb.v1 import session_pb2
from support.command import Command, command
from support.coordinator import RawSession, run


@asynccontextmanager
async def two_members() -> AsyncIterator[tuple[str, aio.Channel, list[RawSession]]]:
    """A coordinator's address, a channel to it, and the members of a view, by rank."""
    coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0"))
    address = await coordinator.start()
    try:
        async with aio.insecure_channel(address) as channel:
            sessions = [await RawSession.register(channel, "digits", pid=pid, failure_timeout=60.0) for pid in (1, 2)]
            ranks = [(await session.view()).rank for session in sessions]
            yield address, channel, [session for _, session in sorted(zip(ranks, sessions, strict=True))]
    finally:
        await coordinator.stop(grace=0.2)


async def paceline(*arguments: str, code: int = 0) -> Command:
    """A command that has ended; the coordinator serves meanwhile."""

    def act() -> Command:
        with command(*arguments) as ended:
            assert ended.wait() == code, str(ended)
            return ended

    return await asyncio.to_thread(act)


def result(ended: Command) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_drain_prints_the_members_asked_to_leave() -> None:
    async def main() -> None:
        async with two_members() as (address, _, (first, second)):
            where = ("--coordinator", address)
            ended = await paceline("drain", "digits", "1", *where)
            assert ended.stdout == "rank 1 (host-a, pid 2) was told to leave at the end of its step\n"
            await second.next("drain")
            ended = await paceline("drain", first.member_id, "--job", "digits", *where, "--json")
            told = {"member_id": first.member_id, "rank": 0, "host": "host-a", "pid": 1}
            assert result(ended) == {"job": "digits", "told": [told]}
            ended = await paceline("drain", "digits", "--all", *where)
            assert ended.stdout.count("was told to leave") == 2
            assert "without checkpoint_dir its state is lost" in ended.stdout.splitlines()[-1]
            ended = await paceline("drain", "digits", "7", *where, code=1)
            assert ended.stderr == (
                "paceline: job 'digits' has no member 7; no member was asked: paceline status digits "
                "lists the members\n"
            )

    run(main)


def test_restart_of_a_running_job_is_refused_unless_forced() -> None:
    async def main() -> None:
        async with two_members() as (address, _, _sessions):
            where = ("--coordinator", address)
            ended = await paceline("restart", "digits", *where, code=1)
            assert "rank 0 (host-a, pid 1), rank 1 (host-a, pid 2) are connected" in ended.stderr
            assert "paceline drain digits --all" in ended.stderr
            ended = await paceline("restart", "digits", "--force", *where, "--json")
            dead = ["rank 0 (host-a, pid 1)", "rank 1 (host-a, pid 2)"]
            assert result(ended) == {"job": "digits", "taken_for_dead": dead, "was_finished": False}
            ended = await paceline("restart", "digits", *where)
            assert "nothing has changed" in ended.stdout
            ended = await paceline("restart", "none", *where, code=1)
            assert ended.stderr == "paceline: there is no job 'none'; jobs: digits\n"

    run(main)


def test_forget_is_refused_until_all_workers_have_left() -> None:
    async def main() -> None:
        async with two_members() as (address, _, sessions):
            where = ("--coordinator", address)
            ended = await paceline("restart", "digits", "--forget", *where, code=1)
            assert "has 2 workers: to make them leave, use paceline drain digits --all" in ended.stderr
            for session in sessions:
                await session.send(leave=session_pb2.Leave())
                await session.next("left")
            assert result(await paceline("restart", "digits", "--forget", *where, "--json")) == {
                "job": "digits",
                "forgotten": True,
            }
            ended = await paceline("restart", "digits", "--forget", *where, code=1)
            assert ended.stderr == "paceline: there is no job 'digits'; paceline status lists the jobs\n"

    run(main)


@pytest.mark.parametrize("by", [("digits",), ("--job", "digits")])
def test_status_shows_the_standing_and_step_of_each_member(by: tuple[str, ...]) -> None:
    async def main() -> None:
        async with two_members() as (address, _, (first, second)):
            await first.heartbeat(operation=4, step=3)
            second.call.cancel()
            members: list[dict[str, Any]] = []
            while not members or members[0]["standing"] != "silent" or not members[1]["step"]:
                members = result(await paceline("status", *by, "--coordinator", address, "--json"))["members"]
            assert [(m["rank"], m["standing"], m["step"]) for m in members] == [(1, "silent", 0), (0, "training", 3)]

    run(main)
