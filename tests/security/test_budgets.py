"""One job's calls get no more room than they leave free, and another's are served meanwhile: in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from security.siege import Attacker

import paceline
import paceline_server.app
from paceline import errors
from paceline_server import Coordinator
from paceline_server._grpc import aio
from paceline_server.limits import Budget
from paceline_server.services.calls import CALL_BYTES
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import Change, KeySet
from paceline_server.storage.memory import MemoryStorage
from pacelinepb.pieces import cut, in_messages
from pacelinepb.v1 import store_pb2 as pb
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.coordinator import RawSession, duration, reason_of, run, running
from support.http2 import framed

MINE, THEIRS = "a-token-for-the-neighbour-0123", "a-token-for-the-attacker-01234"
MEMORY = 64 << 20
_SETTINGS = ServerSettings(memory_bytes=MEMORY)
ROOM = (_SETTINGS.call_bytes // 2 - 3 * _SETTINGS.longest_request) // CALL_BYTES
"""Calls of one job that may wait, about: half of all, and one with a value can still be made."""


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


async def end_of(call: Any) -> None:
    with suppress(aio.AioRpcError, asyncio.CancelledError):
        await call


def test_waiting_calls_of_one_job_are_limited_and_freed(tmp_path: Path) -> None:
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
            fill = in_messages(pb.SetRequest(caller=mine.caller, key="k", value=cut(bytes(100_000))))
            for _ in range(2):
                calls = [store.Get(get, metadata=shown(THEIRS)) for _ in range(ROOM + 50)]
                ends = asyncio.as_completed([asyncio.ensure_future(outcome(call)) for call in calls])
                for _ in range(50):
                    assert (await next(ends)).startswith("LIMIT: the open calls of job 'two' take 12 MiB of")
                for _ in range(20):
                    await store.Set(fill, metadata=shown(MINE))
                assert sum(not call.done() for call in calls) > ROOM - 50
                for call in calls:
                    call.cancel()
                for end in ends:
                    await end

    run(main)


def test_a_burst_of_small_values_is_not_refused() -> None:
    async def main() -> None:
        async with running(memory_bytes=MEMORY) as channel:
            session = await RawSession.register(channel, least=1, most=1)
            store: Any = StoreServiceStub(channel)
            requests = [pb.SetRequest(caller=session.caller, key=str(i), value=cut(bytes(30_000))) for i in range(60)]
            await asyncio.gather(*(store.Set(in_messages(request)) for request in requests))

    run(main)


def test_too_many_large_values_at_once_are_partly_refused() -> None:
    """They come at one time, so all are half way when there is no more room."""

    async def main() -> None:
        async with running(memory_bytes=MEMORY) as channel:
            session = await RawSession.register(channel, least=1, most=1)
            store: Any = StoreServiceStub(channel)
            value = in_messages(pb.SetRequest(caller=session.caller, key="k", value=cut(bytes(1 << 20))))
            ends = await asyncio.gather(*(outcome(store.Set(value)) for _ in range(20)))
            assert {end.partition(":")[0] for end in ends} == {"", "LIMIT"}

    run(main)


def test_refused_calls_are_retried_until_there_is_room() -> None:
    """Workers at one address: those who are refused try again, and the key that all wait for can be set."""

    async def main() -> None:
        coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0", memory_bytes=MEMORY))
        address = await coordinator.start()
        session = await asyncio.to_thread(paceline.join, address, job="one", min_workers=1)
        try:
            async with aio.insecure_channel(address) as channel:
                other = await RawSession.register(channel, "two", least=1, most=1, failure_timeout=60.0)
                store: Any = StoreServiceStub(channel)
                get = pb.GetRequest(caller=other.caller, key="never", timeout=duration(3_600))
                calls = [store.Get(get) for _ in range(ROOM + 50)]
                ends = [asyncio.ensure_future(outcome(call)) for call in calls]
                await next(asyncio.as_completed(ends))
                waits = asyncio.create_task(asyncio.to_thread(session.store.get, "k", timeout=20.0))
                with pytest.raises(errors.LimitExceeded, match="no room is left; give the coordinator more memory"):
                    await asyncio.to_thread(paceline.join, address, job="three", min_workers=1, timeout=3.0)
                joins = asyncio.create_task(asyncio.to_thread(paceline.join, address, job="three", min_workers=1))
                await asyncio.to_thread(session.store.set, "k", bytes(1 << 20))
                for call in calls:
                    call.cancel()
                assert len(await waits) == 1 << 20
                await asyncio.to_thread((await joins).leave)
        finally:
            await asyncio.to_thread(session.leave)
            await coordinator.stop(grace=0.2)

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


def test_a_value_counts_until_stored_even_if_its_caller_hangs_up() -> None:
    """Else a disk that is slow would have them all in memory."""

    async def main() -> int:
        disk = SlowDisk()
        async with running(disk, memory_bytes=MEMORY) as channel:
            session = await RawSession.register(channel, least=1, most=1)
            store: Any = StoreServiceStub(channel)
            request = in_messages(pb.SetRequest(caller=session.caller, key="k", value=cut(bytes(1 << 20))))
            for number in range(10):
                call = asyncio.ensure_future(outcome(store.Set(request)))
                written = asyncio.create_task(disk.written.get())
                await asyncio.wait({call, written}, return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    assert "the open calls of 127.0.0.1 take" in call.result()
                    return number
                call.cancel()
            return 10

    assert run(main) == 5, "16 MiB are for one, and a value counts three times"


class Watched(Budget):
    """Tells when somebody takes some of it, or gives it back."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.changed = asyncio.Event()

    def add(self, who: Hashable, size: int) -> None:
        super().add(who, size)
        self.changed.set()

    async def until_used(self) -> None:
        while not self.used:
            self.changed.clear()
            await self.changed.wait()

    async def until_free(self) -> None:
        while self.used:
            self.changed.clear()
            await self.changed.wait()
        assert self.used == 0


def test_budgets_are_freed_however_calls_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In good order, refused, cancelled, out of time, cut off at any point of a request."""
    budgets: list[Watched] = []

    def watched(total: int) -> Watched:
        budgets.append(Watched(total))
        return budgets[-1]

    monkeypatch.setattr(paceline_server.app, "Budget", watched)
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"{MINE} one\n{THEIRS} two\n")

    async def main() -> None:
        settings = ServerSettings(listen="127.0.0.1:0", token_file=tokens, memory_bytes=MEMORY)
        coordinator = Coordinator(settings)
        address = await coordinator.start()
        for _ in range(2):
            async with aio.insecure_channel(address) as channel:
                session = await RawSession.register(channel, "one", least=1, most=1, token=MINE)
                await session.view()
                store: Any = StoreServiceStub(channel)
                get = pb.GetRequest(caller=session.caller, key="never", timeout=duration(3_600))
                value = in_messages(pb.SetRequest(caller=session.caller, key="k", value=cut(bytes(1 << 20))))
                calls = [
                    *(store.Get(get, metadata=shown(MINE)) for _ in range(20)),
                    *(store.Get(get, metadata=shown(MINE), timeout=0.1) for _ in range(5)),
                    *(store.Get(get, metadata=shown(THEIRS)) for _ in range(5)),
                    *(store.Get(get) for _ in range(5)),
                    *(store.Set(value, metadata=shown(MINE)) for _ in range(10)),
                    store.Get(pb.GetRequest(caller=session.caller, key="x" * 100_000), metadata=shown(MINE)),
                    channel.unary_unary("/grpc.health.v1.Health/Watch")(b"\xff", metadata=shown(MINE)),
                    channel.unary_unary("/pacelinepb.v1.StoreService/Set")(b"\xff", metadata=shown(MINE)),
                    channel.unary_unary("/pacelinepb.v1.SessionService/Session")(b"", metadata=shown(MINE)),
                ]
                ends = [asyncio.ensure_future(end_of(call)) for call in calls]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for call in calls[::3]:
                    call.cancel()
                attacker = Attacker(address, MINE)
                data = b"".join(framed(each) for each in value)
                for method in ("Set", "Wait", "Delete"):
                    attacker.open(f"/pacelinepb.v1.StoreService/{method}", [data[:-1], data[:100], b""] * 30, 3)
                attacker.open("/pacelinepb.v1.SessionService/Session", [b"", data[:100]] * 10, 2)
                await asyncio.to_thread(attacker.press, 0.3)
                for budget in budgets:
                    await budget.until_used()
                attacker.close()
                await session.leave()
            await asyncio.gather(*ends)
            for budget in budgets:
                await budget.until_free()
        await coordinator.stop(grace=0.2)

    run(main)
