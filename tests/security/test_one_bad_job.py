"""A bug that one job meets is that job's: the others go on, and stalls are noticed for them as before."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from paceline_protocol.coordinator import Event, Membership, Ticked
from paceline_server import Coordinator, ServerSettings
from paceline_server._grpc import aio
from paceline_server.key_values import Storeroom
from pacelinepb.v1 import session_pb2, store_pb2
from pacelinepb.v1.session_pb2_grpc import SessionServiceStub
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.coordinator import RawSession, duration, reason_of, refused, run


class Bug(Exception):
    """Nobody has thought of it."""


class Watch:
    """Makes one job fail when it is told of a stall, and sees of which stalls the other is told.

    Attributes:
        told: seconds of each.
        broken: whether the one job fails; a busy machine stalls too, before the test does.
        waits: set once a call waits for a key.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told = asyncio.Queue[float]()
        self.waits = asyncio.Event()
        self.broken = False
        real = Membership.handle

        def handle(membership: Membership, now: float, event: Event) -> Any:
            if isinstance(event, Ticked) and event.slept:
                if membership.state.name == "bad" and self.broken:
                    raise Bug
                if membership.state.name == "good":
                    self.told.put_nowait(event.slept)
            return real(membership, now, event)

        monkeypatch.setattr(Membership, "handle", handle)
        changed = Storeroom._changed

        def changing(store: Storeroom, member_id: str, key: str) -> Any:
            self.waits.set()
            return changed(store, member_id, key)

        monkeypatch.setattr(Storeroom, "_changed", changing)

    async def stall(self, coordinator: Coordinator) -> float:
        """The loop has slept for 100 s; returns of how many the other job was told."""
        timers = coordinator._dispatcher._timers
        assert timers is not None
        timers._wakefulness._last -= 100.0
        async with asyncio.timeout(10.0):
            while (slept := await self.told.get()) < 100.0:
                pass  # this machine was busy
        return slept


def test_a_bug_in_one_job_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def main() -> None:
        watch = Watch(monkeypatch)
        settings = ServerSettings(listen="127.0.0.1:0", state_path=tmp_path / "state.db")
        coordinator = Coordinator(settings)
        try:
            address = await coordinator.start()
            async with aio.insecure_channel(address) as channel:
                # "bad" comes first, and is told first.
                bad = [await RawSession.register(channel, "bad", host=f"host-{name}") for name in "ab"]
                good = [await RawSession.register(channel, "good", host=f"host-{name}") for name in "cd"]
                for session in bad + good:
                    assert (await session.view()).generation == 1
                waiting: Any = StoreServiceStub(channel).Get(
                    store_pb2.GetRequest(caller=bad[0].caller, key="never", timeout=duration(60.0))
                )
                await watch.waits.wait()
                watch.broken = True
                for _ in range(2):  # and the pulse has gone on after the first
                    assert await watch.stall(coordinator) < 200.0

                for session in bad:
                    error = await refused(session)
                    assert reason_of(error) == "SESSION_ENDED"
                    assert "the coordinator failed while it handled job 'bad'" in (error.details() or "")
                with pytest.raises(aio.AioRpcError, match="failed while it handled job 'bad'"):
                    await waiting
                for again in (
                    lambda: RawSession.register(channel, "bad", host="host-e"),
                    lambda: RawSession.resume(channel, bad[0], 1),
                ):  # nothing is decided on what may be half changed
                    with pytest.raises(aio.AioRpcError, match="failed while it handled job 'bad'") as caught:
                        await again()
                    assert reason_of(caught.value) == "SESSION_ENDED"
                for session in good:
                    await session.enter_barrier("b")
                for session in good:
                    await session.barrier_passed()
            said = [record for record in caplog.records if record.levelno >= logging.ERROR]
            assert [record.getMessage() for record in said] == [
                "job bad: the coordinator failed at Ticked, and ends the job's sessions"
            ]
            assert said[0].exc_info is not None
            assert said[0].exc_info[0] is Bug
        finally:
            await coordinator.stop(grace=0.0)

        watch.broken = False
        coordinator = Coordinator(settings)
        try:
            async with aio.insecure_channel(await coordinator.start()) as channel:
                for session in bad:  # its number and its members are what was stored
                    await RawSession.resume(channel, session, 1)
                request = session_pb2.GetViewRequest(job="bad", generation=1)
                view = await SessionServiceStub(channel).GetView(request)
                assert [member.process.host for member in view.members] == ["host-a", "host-b"]
        finally:
            await coordinator.stop(grace=0.0)

    run(main)


def test_a_bug_in_one_job_does_not_stop_a_coordinator_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = Membership.handle

    def handle(membership: Membership, now: float, event: Event) -> Any:
        if broken and membership.state.name == "bad":
            raise Bug
        return real(membership, now, event)

    monkeypatch.setattr(Membership, "handle", handle)
    broken = False

    async def main() -> None:
        nonlocal broken
        settings = ServerSettings(listen="127.0.0.1:0", state_path=tmp_path / "state.db")
        sessions = []
        for broken in (False, True):
            coordinator = Coordinator(settings)
            try:
                async with aio.insecure_channel(await coordinator.start()) as channel:
                    if not broken:
                        sessions = [await RawSession.register(channel, job, least=1, most=1) for job in ("bad", "good")]
                        for session in sessions:
                            await session.view()
                    else:
                        await RawSession.resume(channel, sessions[1], 1)
            finally:
                await coordinator.stop(grace=0.0)

    run(main)
