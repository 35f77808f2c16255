"""A coordinator that ends for good, in good order or not: members are told, or find out, and wait for nothing."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

import paceline
from paceline._session.member import MemberConnection
from paceline.errors import CoordinatorUnreachable, OrphanedError, SessionClosed
from paceline.testing import coordinator
from paceline_protocol.messages import Message, Waiting
from paceline_server import Coordinator, ServerSettings
from paceline_server._grpc import aio
from support.coordinator import RawSession, run
from support.processes import Worker

pytestmark = pytest.mark.alone

SOON_S = 1.5
"""What is dead is said within about a second. Everything that was waited for before took 2 s or more."""


def join(address: str, size: int) -> list[paceline.Session]:
    """Sessions of this process, by rank."""

    def one(rank: int) -> paceline.Session:
        return paceline.join(address, job="ends", rank=rank, world_size=size, coordinator_returns=False)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def first_of_two(address: str) -> paceline.Session:
    """Waits for a second one, which does not come."""
    return paceline.join(address, job="ends", rank=0, world_size=2, timeout=60.0, coordinator_returns=False)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a worker of this process has registered and was told what it waits for."""
    told = threading.Event()
    hear = MemberConnection.on_message

    def on_message(connection: MemberConnection, message: Message) -> None:
        hear(connection, message)
        if isinstance(message, Waiting):
            told.set()

    monkeypatch.setattr(MemberConnection, "on_message", on_message)
    return told


def within(seconds: float, act: Callable[[], object]) -> None:
    """Does it, which must not take longer."""
    began = time.monotonic()
    act()
    took = time.monotonic() - began
    assert took < seconds, f"it took {took:.1f} s"


def sums(sessions: list[paceline.Session]) -> list[int]:
    """One collective of them all."""
    with ThreadPoolExecutor(len(sessions)) as pool:
        return list(pool.map(lambda session: int(session.group.all_reduce(np.int64(1))), sessions))


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A coordinator in a process of its own, and its address."""
    command = [sys.executable, "-m", "paceline_server", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        try:
            assert started.stdout is not None
            yield started, started.stdout.readline().split()[-1]
        finally:
            started.kill()


def test_members_work_on_and_leave_at_once_after_a_final_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    with coordinator(for_good=True) as address:
        sessions = join(address, 2)
    with pytest.raises(SessionClosed):
        within(SOON_S, lambda: sessions[0].store.set("key", b""))
    with pytest.raises(OrphanedError, match=f"the coordinator at {address} has ended for good"):
        within(SOON_S, lambda: sessions[0].barrier("b"))
    assert sums(sessions) == [2, 2]
    within(SOON_S, lambda: [session.leave() for session in sessions])
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_final_shutdown_fails_a_worker_waiting_for_its_view(waits: threading.Event) -> None:
    with ThreadPoolExecutor(1) as pool:
        with coordinator(for_good=True) as address:
            waiting = pool.submit(first_of_two, address)
            assert waits.wait(10.0)
        with pytest.raises(OrphanedError, match=r"has ended for good.*; before that: .*1"):
            waiting.result(SOON_S)


def test_a_member_that_does_not_read_does_not_delay_shutdown() -> None:
    async def main() -> float:
        server = Coordinator(ServerSettings(listen="127.0.0.1:0"))
        async with aio.insecure_channel(await server.start()) as channel:
            session = await RawSession.register(channel, least=1, most=1)
            began = time.monotonic()
            await server.stop(grace=0.2, for_good=True)
            took = time.monotonic() - began
            while not (await session.read()).HasField("left"):
                pass
            return took

    assert 0.2 <= run(main) < 1.0


def test_a_coordinator_kill_fails_a_worker_waiting_for_its_view(waits: threading.Event) -> None:
    with process() as (server, address), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first_of_two, address)
        assert waits.wait(10.0)
        server.send_signal(signal.SIGKILL)
        with pytest.raises(OrphanedError, match=f"{address} is gone: connections to it are refused"):
            waiting.result(SOON_S)


def test_members_leave_at_once_after_a_coordinator_kill() -> None:
    with process() as (server, address):
        sessions = join(address, 2)
        server.send_signal(signal.SIGKILL)
        server.wait()
        assert sums(sessions) == [2, 2]
        within(SOON_S, lambda: [session.leave() for session in sessions])


def test_join_does_not_retry_when_the_coordinator_will_not_return() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CoordinatorUnreachable, match=f"{address} is gone: connections to it are refused"):
            within(
                SOON_S, lambda: paceline.join(address, rank=1, world_size=2, timeout=60.0, coordinator_returns=False)
            )


END = """
from paceline._base.embedded import coordinator
import paceline._base.embedded as lasting

lasting.block = coordinator(for_good=True)
address = lasting.block.__enter__()
emit("listens", address=address)
lasting.session = paceline.join(address, job="ends", rank=0, world_size=2)
"""


def test_the_coordinator_stops_cleanly_when_its_process_exits_in_the_block(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(END, {})
    try:
        address = worker.expect("listens")["address"]
        with paceline.join(address, job="ends", rank=1, world_size=2, coordinator_returns=False):
            assert worker.wait() == 0
    finally:
        worker.close()
    assert worker.stderr == ""
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []
