"""How far one coordinator carries: 1,000 sessions with a connection each, and how soon it sees a SIGKILL.

Run as a script it prints one JSON object. Three kinds of processes: the coordinator (whose memory is read from /proc
and whose observer says when a stream ended), one client process that holds all sessions on raw grpc.aio stubs, and, for
the kills, one worker process after the other. CLOCK_MONOTONIC is the same for all processes of a machine.

With `--idle 20` it also measures what idle sessions cost; with `--state etcd://...` the coordinator
shares its state. Bytes are those of the loopback interface, so run it alone there (`unshare -n`).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # for `support`, which a script does not find

from paceline._base.rpc import backoff
from paceline_server import Coordinator, ServerSettings
from paceline_server._grpc import aio, grpc
from paceline_server.failover import FailoverCoordinator
from paceline_server.storage.etcd_address import EtcdAddress
from support.coordinator import RawSession

__all__ = ["measure"]


def measure(
    sessions: int = 1_000,
    rounds: int = 20,
    kills: int = 20,
    failure_timeout: float = 3.0,
    idle: float = 0.0,
    state: str = "",
) -> dict[str, Any]:
    """Measures everything; times in seconds unless the name says ms."""
    coordinator, address = _start("serve", state)
    try:
        assert coordinator.stdout is not None
        kill_ms = [_kill_once(address, coordinator.stdout) for _ in range(kills)]
        before = _rss_kib(coordinator.pid)
        arguments = [str(sessions), str(rounds), str(failure_timeout), str(coordinator.pid), str(idle)]
        clients = subprocess.run(
            [sys.executable, __file__, "clients", address, *arguments],
            stdout=subprocess.PIPE,
            check=True,
        )
        figures: dict[str, Any] = json.loads(clients.stdout)
    finally:
        coordinator.kill()
        coordinator.communicate()
    figures["rss_per_session_kib"] = round((figures.pop("rss_kib") - before) / sessions, 1)
    figures["rss_per_session_after_rounds_kib"] = round((figures.pop("rss_after_kib") - before) / sessions, 1)
    figures["kill_seen_ms_p50"] = round(statistics.median(kill_ms), 2)
    figures["kill_seen_ms_max"] = round(max(kill_ms), 2)
    return figures


def _start(mode: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Starts this file in another mode; returns the process and its first line."""
    process = subprocess.Popen([sys.executable, __file__, mode, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def _rss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise LookupError(f"no VmRSS for process {pid}")


def _allow_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# The coordinator's process -------------------------------------------------------------------------------------------


async def _serve(state: str) -> None:
    def observe(what: str, member_id: str, at: float) -> None:
        if what == "stream_ended":
            print(json.dumps({"member_id": member_id, "at": at}), flush=True)

    settings = ServerSettings(listen="127.0.0.1:0", etcd=EtcdAddress.parse(state) if state else None)
    coordinator = FailoverCoordinator(settings, observer=observe) if state else Coordinator(settings, observer=observe)
    print(await coordinator.start(), flush=True)
    await coordinator.wait_for_termination()


# One worker, to be killed --------------------------------------------------------------------------------------------


async def _work(address: str) -> None:
    async with aio.insecure_channel(address) as channel:
        session = await RawSession.register(channel, job=f"kill-{os.getpid()}", least=1, most=1)
        await session.view()
        print(session.member_id, flush=True)
        while True:
            await session.heartbeat()
            await asyncio.sleep(session.heartbeat_interval)


def _kill_once(address: str, events: IO[str]) -> float:
    """Returns the milliseconds from just before os.kill to the coordinator's event."""
    worker, member_id = _start("work", address)
    started = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)
    while (event := json.loads(events.readline()))["member_id"] != member_id:
        pass
    worker.communicate()
    return float((event["at"] - started) * 1e3)


# All clients in one process ------------------------------------------------------------------------------------------


async def _clients(
    address: str, count: int, rounds: int, failure_timeout: float, coordinator: int, idle: float
) -> dict[str, Any]:
    # Each channel needs its own pool, or gRPC would put channels with equal arguments on one connection.
    channels = [aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(count)]
    started = time.monotonic()
    sessions = await asyncio.gather(
        *(_register(channel, count, failure_timeout, number) for number, channel in enumerate(channels, start=1))
    )
    connected = time.monotonic()
    views = await asyncio.gather(*(session.view() for session in sessions))
    formed = time.monotonic()
    assert {view.world_size for view in views} == {count}
    assert {view.rank for view in views} == set(range(count))
    beating = [asyncio.create_task(_beat(session)) for session in sessions]
    pages = await asyncio.gather(*(session.get_pages(view) for session, view in zip(sessions, views, strict=True)))
    fetched = time.monotonic()
    assert {hashlib.sha256(page).digest() for page in pages} == {views[0].members_sha256}
    rss = _rss_kib(coordinator)
    quiet = await _idle(idle, coordinator) if idle else {}
    totals, singles = [], []
    for round_ in range(rounds):
        begun = time.monotonic()
        singles += await asyncio.gather(*(_timed_barrier(session, round_) for session in sessions))
        totals.append(time.monotonic() - begun)
    figures = {
        "sessions": count,
        "connect_s": round(connected - started, 3),
        "view_after_last_connect_s": round(formed - connected, 3),
        "view_and_members_after_last_connect_s": round(fetched - connected, 3),
        "barrier_round_s_p50": round(statistics.median(totals), 4),
        "barrier_round_s_max": round(max(totals), 4),
        "barrier_member_s_p50": round(statistics.median(singles), 4),
        "rss_kib": rss,
        "rss_after_kib": _rss_kib(coordinator),
        **quiet,
    }
    for task in beating:
        task.cancel()
    return figures


async def _idle(seconds: float, coordinator: int) -> dict[str, float]:
    """Measures the coordinator's processor time, and the traffic of the machine with itself, per second."""

    def used() -> tuple[float, int]:
        fields = Path(f"/proc/{coordinator}/stat").read_text().rpartition(")")[2].split()
        loopback = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.split()[0] == "lo:")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(loopback.split()[1])

    began, (cpu, sent) = time.monotonic(), used()
    await asyncio.sleep(seconds)
    took, (cpu_after, sent_after) = time.monotonic() - began, used()
    return {
        "idle_cpu_per_s": round((cpu_after - cpu) / took, 4),
        "idle_loopback_kib_per_s": round((sent_after - sent) / took / 1024, 1),
    }


async def _register(channel: aio.Channel, count: int, failure_timeout: float, pid: int) -> RawSession:
    """Registers, and like a worker reconnects if its connection was closed, as one process calls on 1,000 slowly."""
    for attempt in itertools.count():
        try:
            return await RawSession.register(
                channel, job="scale", least=count, most=count, failure_timeout=failure_timeout, pid=pid
            )
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(backoff(attempt))
    raise AssertionError  # not reached


async def _beat(session: RawSession) -> None:
    while True:
        await asyncio.sleep(session.heartbeat_interval)
        await session.heartbeat()


async def _timed_barrier(session: RawSession, round_: int) -> float:
    begun = time.monotonic()
    await session.enter_barrier("scale", round_)
    await session.barrier_passed()
    return time.monotonic() - begun


def _main() -> None:
    _allow_files()
    if len(sys.argv) > 1 and sys.argv[1] == "serve":
        asyncio.run(_serve(sys.argv[2]))
    elif len(sys.argv) > 1 and sys.argv[1] == "work":
        asyncio.run(_work(sys.argv[2]))
    elif len(sys.argv) > 1 and sys.argv[1] == "clients":
        address, count, rounds, failure_timeout, coordinator, idle = sys.argv[2:]
        done = _clients(address, int(count), int(rounds), float(failure_timeout), int(coordinator), float(idle))
        print(json.dumps(asyncio.run(done)), flush=True)
        os._exit(0)  # closing a thousand channels properly takes seconds, and the results are printed
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--sessions", type=int, default=1_000)
        parser.add_argument("--rounds", type=int, default=20)
        parser.add_argument("--kills", type=int, default=20)
        parser.add_argument("--failure-timeout", type=float, default=3.0)
        parser.add_argument("--idle", type=float, default=0.0)
        parser.add_argument("--state", default="")
        print(json.dumps(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    _main()
