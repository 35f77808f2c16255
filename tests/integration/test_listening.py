"""Where a coordinator listens: names, ports that are taken, and a resolver that stalls."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from typing import Any

import pytest

from paceline_server import Coordinator, PortInUse, ServerSettings, listening
from paceline_server._grpc import aio
from paceline_server.listening import targets_of
from pacelinepb.v1 import admin_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from support.coordinator import run

pytestmark = pytest.mark.alone


def test_a_port_in_use_raises_port_in_use() -> None:
    async def main() -> None:
        first = Coordinator(ServerSettings(listen="127.0.0.1:0"))
        address = await first.start()
        second = Coordinator(ServerSettings(listen=address))
        with pytest.raises(PortInUse, match=f"{address} is in use"):
            await second.start()
        await second.stop()
        await first.stop()

    run(main)


def test_a_port_taken_after_the_check_raises_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where two launchers start at once: each may see the other's look."""

    async def main() -> None:
        first = Coordinator(ServerSettings(listen="127.0.0.1:0"))
        address = await first.start()
        monkeypatch.setattr(listening, "check_free", lambda *_: None)
        second = Coordinator(ServerSettings(listen=address))
        with pytest.raises(PortInUse, match=f"{address}: another process has just taken the port") as caught:
            await second.start()
        assert caught.value.errno == errno.EADDRINUSE
        await second.stop()
        await first.stop()

    run(main)


def test_an_address_of_another_machine_is_an_error() -> None:
    async def main() -> None:
        with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0"):  # TEST-NET-1: nobody has it
            await Coordinator(ServerSettings(listen="192.0.2.1:0")).start()

    run(main)


async def answers(address: str) -> bool:
    async with aio.insecure_channel(address) as channel:
        await AdminServiceStub(channel).ListJobs(admin_pb2.ListJobsRequest(), timeout=5.0)
    return True


def test_the_coordinator_listens_at_all_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """At one port, also where any will do; port 0 may be free at one of them and taken at another."""
    known = {"node": ["127.0.0.1", "127.0.0.2", "127.0.0.1"]}
    real = socket.getaddrinfo

    def look_up(host: str, port: int, **how: Any) -> list[Any]:
        if host in known and not how["flags"]:
            return [found for ip in known[host] for found in real(ip, port, **how)]
        return real(host, port, **how)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    async def main() -> None:
        coordinator = Coordinator(ServerSettings(listen="node:0"))
        name, _, port = (await coordinator.start()).rpartition(":")
        assert name == "node"
        assert [await answers(f"{ip}:{port}") for ip in ("127.0.0.1", "127.0.0.2")] == [True, True]
        with pytest.raises(PortInUse, match=f"node:{port} is in use"):
            await Coordinator(ServerSettings(listen=f"node:{port}")).start()
        await coordinator.stop()

    run(main)


def test_a_stalled_resolver_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And holds nothing up meanwhile: neither the loop nor the end of it."""
    release = threading.Event()

    def stall(host: str, port: int, **how: Any) -> list[Any]:
        if how["flags"]:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        release.wait(20)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", stall)

    async def main() -> None:
        starting = asyncio.create_task(targets_of("far:7400", "far", 7400, look_up_s=0.2))
        began = time.monotonic()
        await asyncio.sleep(0.01)
        assert time.monotonic() - began < 10.0
        with pytest.raises(OSError, match=r"cannot listen on far:7400: looking up its name took longer than 0\.2 s"):
            await starting

    began = time.monotonic()
    try:
        run(main)
        assert time.monotonic() - began < 15.0
    finally:
        release.set()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 64])
def test_an_unresolved_or_invalid_listen_name_raises_os_error(host: str) -> None:
    with pytest.raises(OSError, match=f"cannot listen on {host}:7400: "):
        run(Coordinator(ServerSettings(listen=f"{host}:7400")).start)
