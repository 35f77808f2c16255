"""The store over gRPC: waiting, repeats, refusals, and what a restart keeps."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from paceline_server._grpc import aio, grpc
from paceline_server.storage.base import Change
from paceline_server.storage.memory import MemoryStorage
from paceline_server.storage.sqlite import SqliteStorage
from pacelinepb.pieces import cut, in_messages
from pacelinepb.v1 import store_pb2 as pb
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.coordinator import RawSession, duration, reason_of, run, running


class Store:
    """A member's store calls."""

    def __init__(self, channel: aio.Channel, session: RawSession) -> None:
        self.stub: Any = StoreServiceStub(channel)
        self.caller = session.caller

    async def set(self, key: str, value: bytes = b"v", call: int = 0) -> None:
        await self.stub.Set(in_messages(pb.SetRequest(caller=self.caller, key=key, value=cut(value), call=call)))

    async def get(self, key: str, timeout: float = 0.0) -> bytes:
        request = pb.GetRequest(caller=self.caller, key=key, timeout=duration(timeout))
        value = (await self.stub.Get(request)).value
        assert isinstance(value, bytes)
        return value

    async def add(self, key: str, amount: int, call: int) -> int:
        answer = await self.stub.Add(pb.AddRequest(caller=self.caller, key=key, amount=amount, call=call))
        return int(answer.value)

    async def delete(self, key: str, call: int = 0) -> bool:
        answer = await self.stub.Delete(pb.DeleteRequest(caller=self.caller, key=key, call=call))
        return bool(answer.existed)


def test_get_and_wait_return_once_another_member_sets_the_key() -> None:
    async def main() -> None:
        async with running() as channel:
            first, second = [Store(channel, await RawSession.register(channel)) for _ in range(2)]
            getting = asyncio.ensure_future(first.get("a", 10.0))
            waiting = asyncio.ensure_future(
                first.stub.Wait([pb.WaitRequest(caller=first.caller, keys=["a", "b"], timeout=duration(10))])
            )
            await second.set("a", b"1")
            assert await getting == b"1"
            await second.set("b")
            await waiting
            assert await second.delete("a")
            assert not await second.delete("a")

    run(main)


def test_add_and_compare_set_can_be_repeated_safely() -> None:
    async def main() -> None:
        async with running() as channel:
            store = Store(channel, await RawSession.register(channel))
            assert [await store.add("n", 5, call=1), await store.add("n", 5, call=1)] == [5, 5]
            assert await store.add("n", -7, call=2) == -2
            swap = pb.CompareSetRequest(caller=store.caller, key="c", desired=[b"x"], call=3)
            for _ in range(2):
                answer = await store.stub.CompareSet([swap])
                assert (answer.swapped, answer.value) == (True, b"x")
            lost = await store.stub.CompareSet(
                [pb.CompareSetRequest(caller=store.caller, key="none", expected=[b""], desired=[b"x"], call=4)]
            )
            assert (lost.swapped, lost.HasField("value")) == (False, False)

    run(main)


def test_invalid_store_calls_are_refused() -> None:
    async def main() -> None:
        async with running(max_value_bytes=8) as channel:
            session = await RawSession.register(channel)
            store = Store(channel, session)
            await store.set("text", b"hello")
            stolen = pb.Caller(job="job", member_id=session.member_id, session_token=b"x")
            nobody = pb.Caller(job="other", member_id=session.member_id, session_token=session.token)
            for method, request, reason in [
                ("Get", pb.GetRequest(caller=store.caller, key="gone", timeout=Duration()), "TIMEOUT"),
                ("Get", pb.GetRequest(caller=store.caller, key="gone"), "BAD_REQUEST"),
                ("Wait", pb.WaitRequest(caller=store.caller, keys=["gone"], timeout=duration(0.01)), "TIMEOUT"),
                ("Wait", pb.WaitRequest(caller=store.caller, keys=["k"] * 1001, timeout=duration(1)), "LIMIT"),
                ("Set", pb.SetRequest(caller=store.caller, key=""), "BAD_REQUEST"),
                ("Set", pb.SetRequest(caller=store.caller, key="k" * 1025), "BAD_REQUEST"),
                ("Set", pb.SetRequest(caller=store.caller, key="k", value=[b"1234", b"56789"]), "LIMIT"),
                ("Add", pb.AddRequest(caller=store.caller, key="text", amount=1), "BAD_REQUEST"),
                ("Set", pb.SetRequest(caller=stolen, key="k"), "SESSION_ENDED"),
                ("Set", pb.SetRequest(caller=nobody, key="k"), "SESSION_ENDED"),
                ("Set", pb.SetRequest(key="k"), "SESSION_ENDED"),
            ]:
                with pytest.raises(aio.AioRpcError) as caught:
                    await getattr(store.stub, method)(in_messages(request) if method in ("Set", "Wait") else request)
                assert reason_of(caught.value) == reason, request

    run(main)


def test_leaving_ends_the_sessions_waiting_gets_and_refuses_its_sets() -> None:
    async def main() -> None:
        async with running() as channel:
            session = await RawSession.register(channel)
            store = Store(channel, session)
            getting = asyncio.ensure_future(store.get("never", 10.0))
            await store.set("k")  # the call before it has arrived too: one connection, in order
            await session.leave()
            for call in (getting, store.set("k")):
                with pytest.raises(aio.AioRpcError) as caught:
                    await call
                assert reason_of(caught.value) == "SESSION_ENDED"
                assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION

    run(main)


class HeldStorage(MemoryStorage):
    """A disk that takes its time: while `held`, nothing is durable."""

    held = False

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[asyncio.Future[None]] = []

    def write(self, changes: Sequence[Change]) -> asyncio.Future[None]:
        done = super().write(changes)
        if self.held:
            done = asyncio.get_running_loop().create_future()
            self._waiting.append(done)
        return done

    def let_go(self) -> None:
        self.held = False
        for each in self._waiting:
            each.set_result(None)


def test_no_call_is_answered_before_pending_writes_are_stored() -> None:
    """Neither what others have written, nor that this caller's own first try has been written."""

    async def main() -> None:
        storage = HeldStorage()
        async with running(storage=storage) as channel:
            session = await RawSession.register(channel)
            mine, theirs = Store(channel, session), Store(channel, await RawSession.register(channel))
            elsewhere = Store(channel, await RawSession.register(channel, job="other"))
            await mine.set("there", b"old")
            await elsewhere.set("k")
            storage.held = True
            writes = [asyncio.ensure_future(call) for call in (mine.set("new"), mine.delete("there"))]
            writes.append(asyncio.ensure_future(mine.add("n", 5, call=1)))
            await elsewhere.get("k")  # what was sent before it on this connection has arrived
            wait = pb.WaitRequest(caller=theirs.caller, keys=["new"], timeout=duration(10))
            swap = pb.CompareSetRequest(caller=theirs.caller, key="there", expected=[b"x"], desired=[b"y"], call=1)
            answers = [
                asyncio.ensure_future(call)
                for call in (
                    theirs.get("new"),
                    theirs.get("there"),
                    theirs.delete("there"),
                    theirs.stub.CompareSet([swap]),
                    theirs.stub.Wait([wait]),
                    mine.add("n", 5, call=1),
                )
            ]
            for _ in range(5):
                await elsewhere.get("k")
            assert not any(each.done() for each in (*writes, *answers))
            storage.let_go()
            value, missing, existed, swapped, _, total = await asyncio.gather(*answers, return_exceptions=True)
            assert (value, existed, total) == (b"v", False, 5)
            assert reason_of(missing) == "TIMEOUT"
            assert not swapped.swapped
            await asyncio.gather(*writes)

    run(main)


class FullStorage(MemoryStorage):
    """A disk that is full, or takes its time and then is full.

    Attributes:
        full: the next changes are refused.
        held: they are refused only when the test says so.
    """

    full = held = False

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[asyncio.Future[None]] = []

    def write(self, changes: Sequence[Change]) -> asyncio.Future[None]:
        if not self.full or not changes:
            return super().write(changes)
        refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(refused)
        if not self.held:
            self.refuse()
        return refused

    def refuse(self) -> None:
        for each in self.waiting:
            each.set_exception(OSError("no space"))
        self.waiting.clear()


def test_a_failed_write_can_be_repeated_and_is_applied_once() -> None:
    """A repeat tells nothing that a restart takes back, and changes nothing twice."""

    async def main() -> None:
        storage = FullStorage()
        async with running(storage=storage) as channel:
            session = await RawSession.register(channel)
            mine, theirs = Store(channel, session), Store(channel, await RawSession.register(channel))
            await mine.set("gone")
            storage.full = True
            for _ in range(2):
                with pytest.raises(aio.AioRpcError):
                    await mine.add("n", 5, call=1)
                with pytest.raises(aio.AioRpcError):
                    await mine.set("k", b"v", call=2)
                with pytest.raises(aio.AioRpcError):
                    await mine.delete("gone", call=3)
            storage.full = False
            assert await theirs.add("n", 1, call=1) == 6
            assert await mine.add("n", 5, call=1) == 5
            await mine.set("k", b"v", call=2)
            assert await mine.delete("gone", call=3)
            stored = storage.jobs["job"]
            assert stored.keys == {"n": b"6", "k": b"v"}
            assert stored.answers[session.member_id] == {1: (1, 5), 2: (2, 0), 3: (3, 1)}

    run(main)


def test_a_repeated_write_fails_when_the_first_try_is_not_stored() -> None:
    """The connection broke, so nobody heard of the first try, and the repeat came while it was being stored."""

    async def main() -> None:
        storage = FullStorage()
        async with running(storage=storage) as channel:
            session = await RawSession.register(channel)
            mine, elsewhere = Store(channel, session), Store(channel, await RawSession.register(channel, job="other"))
            await elsewhere.set("k")
            storage.full = storage.held = True
            first = asyncio.ensure_future(mine.set("k", b"v", call=1))
            while not storage.waiting:
                await elsewhere.get("k")
            first.cancel()
            repeat = asyncio.ensure_future(mine.set("k", b"v", call=1))
            for _ in range(5):
                await elsewhere.get("k")
            assert not repeat.done()
            storage.full = False
            storage.refuse()
            with pytest.raises(aio.AioRpcError):
                await repeat
            await mine.set("k", b"v", call=1)
            assert storage.jobs["job"].keys == {"k": b"v"}

    run(main)


def test_answers_to_store_calls_survive_a_restart(tmp_path: Path) -> None:
    """A call that is repeated because its answer was lost has been made once, whatever others have written since."""

    async def main() -> None:
        path = tmp_path / "state.db"
        async with running(state_path=path) as channel:
            sessions = [await RawSession.register(channel) for _ in range(2)]
            for session in sessions:
                await session.view()
            mine, theirs = (Store(channel, session) for session in sessions)
            assert await mine.add("n", 5, call=1) == 5
            await mine.set("k", b"mine", call=2)
            assert await mine.delete("k", call=3)
            await theirs.set("k", b"theirs", call=1)
        async with running(state_path=path) as channel:
            mine = Store(channel, await RawSession.resume(channel, sessions[0], 1))
            assert await mine.add("n", 5, call=1) == 5
            await mine.set("k", b"mine", call=2)
            assert await mine.delete("k", call=3)
            assert await mine.get("k") == b"theirs"
            await (await RawSession.resume(channel, sessions[1], 1)).leave()
        async with running(state_path=path) as channel:
            gone = Store(channel, sessions[1])
            with pytest.raises(aio.AioRpcError) as caught:
                await gone.set("k", b"theirs", call=1)
            assert reason_of(caught.value) == "SESSION_ENDED"
        storage = SqliteStorage(path)
        (job,) = await storage.load()
        await storage.close()
        assert list(job.answers) == [sessions[0].member_id], "a member that has left repeats nothing"

    run(main)


def test_the_store_survives_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "state.db"
        async with running(state_path=path) as channel:
            sessions = [await RawSession.register(channel) for _ in range(2)]
            for session in sessions:
                await session.view()
            store = Store(channel, sessions[0])
            await store.set("k", b"kept")
            await asyncio.gather(*(store.add("n", 1, call) for call in range(1, 51)))
        async with running(state_path=path) as channel:
            store = Store(channel, await RawSession.resume(channel, sessions[0], 1))
            assert (await store.get("k"), await store.get("n")) == (b"kept", b"50")

    run(main)
