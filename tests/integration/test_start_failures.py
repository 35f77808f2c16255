"""A coordinator that does not come up, or stumbles behind its own back: nothing stays open, and nothing ends unseen."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from grpc.aio._server import Server

from paceline_server import Coordinator, ServerSettings
from paceline_server.security.tls import CertificateKeeper, TlsPaths, TlsUnusable
from paceline_server.storage.memory import MemoryStorage
from support.certificates import make_folder
from support.coordinator import run
from support.ports import free_port

SOON = 4.0


class Storage(MemoryStorage):
    """Counts how often it is closed."""

    closed = 0

    async def close(self) -> None:
        self.closed += 1


def watchers() -> int:
    """Threads that look at certificates."""
    return sum(thread.name == "paceline-certificates" for thread in threading.enumerate())


def wait_for_no_watcher() -> None:
    end = time.monotonic() + SOON
    while watchers():
        assert time.monotonic() < end, "it looks on"
        time.sleep(0.01)


def test_unusable_certificates_leave_the_storage_closed(tmp_path: Path) -> None:
    folder, storage = make_folder(tmp_path / "tls"), Storage()
    paths: Any = {**folder.server(), "tls_key": folder.path / "nowhere.key"}

    async def main() -> None:
        coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0", **paths), storage=storage)
        with pytest.raises(TlsUnusable):
            await coordinator.start()
        await coordinator.stop()

    run(main)
    assert storage.closed == 1


def test_canceling_start_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, storage, port = make_folder(tmp_path / "tls"), Storage(), free_port()
    start = Server.start

    async def main() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(server: Server) -> None:
            begun.set()
            await go_on.wait()
            await start(server)

        monkeypatch.setattr(Server, "start", slow)
        settings = ServerSettings(listen=f"127.0.0.1:{port}", **folder.server())
        coordinator = Coordinator(settings, storage=storage)
        starting = asyncio.create_task(coordinator.start())
        await begun.wait()
        assert watchers() == 1
        starting.cancel()
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(main)
    assert storage.closed == 1
    wait_for_no_watcher()
    with socket.socket() as again:  # no SO_REUSEADDR: nobody listens there any more
        again.bind(("127.0.0.1", port))


def test_the_certificate_watcher_survives_any_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = TlsPaths.of(ServerSettings(**make_folder(tmp_path / "tls").server()))
    assert paths is not None
    first, looks, enough = paths.read(), [0], threading.Event()

    def fail(*_: object) -> Any:
        looks[0] += 1
        if looks[0] == 3:
            enough.set()
        raise RuntimeError("nobody thought of that")

    keeper = CertificateKeeper(paths, first, look_s=0.01)
    monkeypatch.setattr(TlsPaths, "read", fail)
    try:
        assert enough.wait(SOON), "it has given up"
    finally:
        keeper.close()
    wait_for_no_watcher()
    assert caplog.text.count("RuntimeError: nobody thought of that") == 1, "once, not at every look"
    assert "the last certificate stays in force" in caplog.text
