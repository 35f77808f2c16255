"""One job's calls get no more room than they leave free, and another's are served meanwhile: in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline_server._grpc import aio
from paceline_server.services.calls import CALL_BYTES
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import Change, KeySet
from paceline_server.storage.memory import MemoryStorage
from pacelinepb.v1 import store_pb2 as pb
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.coordinator import RawSession, duration, reason_of, run, running

MINE, THEIRS = "a-token-for-the-neighbour-0123", "a-token-for-the-attacker-01234"
MEMORY = 64 << 20
ROOM = ServerSettings(memory_bytes=MEMORY).call_bytes // 2 // CALL_BYTES
"""Calls that one job may have open, about: half of all."""


def shown(token: str) -> aio.Metadata:
    return aio.Metadata(("authorization", f"Bearer {token}"))


async def outcome(call: Any) -> str:
    """Why a call was refused; empty if it was cancelled."""
    try:
        await call
    except aio.AioRpcError as error:
        return f"{reason_of(error)}: {error.details()}"
    except asyncio.CancelledError:
        pass
    return ""


def test_calls_of_one_job_that_wait(tmp_path: Path) -> None:
    """So many wait, and more are refused; all is free again when they have ended."""
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"{MINE} one\n{THEIRS} two\n")

    async def main() -> None:
        async with running(token_file=tokens, memory_bytes=MEMORY) as channel:
            mine, theirs = [
                await RawSession.register(channel, job, least=1, most=1, token=token, failure_timeout=3_600.0)
                for job, token in (("one", MINE), ("two", THEIRS))
            ]
            store: Any = StoreServiceStub(channel)
            get = pb.GetRequest(caller=theirs.caller, key="never", timeout=duration(3_600))
            fill = pb.SetRequest(caller=mine.caller, key="k", value=bytes(100_000))
            for _ in range(2):
                calls = [store.Get(get, metadata=shown(THEIRS)) for _ in range(ROOM + 50)]
                ends = asyncio.as_completed([asyncio.ensure_future(outcome(call)) for call in calls])
                for _ in range(50):
                    assert (await next(ends)).startswith("LIMIT: the open calls of job 'two' take 11 MiB of")
                for _ in range(20):
                    await store.Set(fill, metadata=shown(MINE))
                assert sum(not call.done() for call in calls) > ROOM - 50
                for call in calls:
                    call.cancel()
                for end in ends:
                    await end

    run(main)


def test_a_burst_of_values_waits_for_room_and_none_is_refused() -> None:
    async def main() -> None:
        async with running(memory_bytes=MEMORY) as channel:
            session = await RawSession.register(channel, least=1, most=1)
            store: Any = StoreServiceStub(channel)
            requests = [pb.SetRequest(caller=session.caller, key=str(i), value=bytes(30_000)) for i in range(60)]
            await asyncio.gather(*(store.Set(request) for request in requests))

    run(main)


class SlowDisk(MemoryStorage):
    """Keys are never durable.

    Attributes:
        written: has an item for each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Queue[KeySet]()
        self._pending: list[asyncio.Future[None]] = []

    def write(self, changes: Sequence[Change]) -> asyncio.Future[None]:
        if not isinstance(changes[0], KeySet):
            return super().write(changes)
        self.written.put_nowait(changes[0])
        self._pending.append(asyncio.get_running_loop().create_future())
        return self._pending[-1]

    async def close(self) -> None:
        for future in self._pending:
            future.set_result(None)


def test_a_value_counts_until_it_is_stored_though_its_caller_hangs_up() -> None:
    """Else a disk that is slow would have them all in memory."""

    async def main() -> int:
        disk = SlowDisk()
        async with running(disk, memory_bytes=MEMORY) as channel:
            session = await RawSession.register(channel, least=1, most=1)
            store: Any = StoreServiceStub(channel)
            request = pb.SetRequest(caller=session.caller, key="k", value=bytes(1 << 20))
            for number in range(10):
                call = asyncio.ensure_future(outcome(store.Set(request)))
                written = asyncio.create_task(disk.written.get())
                await asyncio.wait({call, written}, return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    assert "the open calls of 127.0.0.1 take" in call.result()
                    return number
                call.cancel()
            return 10

    assert run(main) == 3, "12 MiB are for one, and a value counts three times"
