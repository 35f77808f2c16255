"""Knocking: only a refused connection proves anything, and no name holds the coordinator up."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

from paceline_server import probe_address
from paceline_server.probe_address import is_refused


class Wire:
    """In place of `asyncio.open_connection`: which addresses refuse, answer, or cannot be reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **ends: Exception | None) -> None:
        self._ends = ends
        monkeypatch.setattr(asyncio, "open_connection", self._open)

    async def _open(self, host: str, port: int) -> Any:
        end = self._ends[host]
        if end is not None:
            raise end

        class Writer:
            def close(self) -> None:
                pass

        return None, Writer()


def test_only_a_refusal_proves_that_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"10.0.0.1": ConnectionRefusedError(), "10.0.0.2": None, "10.0.0.3": OSError("no route"), "::1": None}
    Wire(monkeypatch, **ends)
    assert asyncio.run(is_refused("10.0.0.1:1"))
    for address in ("10.0.0.2:1", "10.0.0.3:1", "[::1]:1"):
        assert not asyncio.run(is_refused(address))


@pytest.mark.parametrize("address", ["", ":", "host", "host:", "host:x", "a..b:1", f"{'x' * 64}:1", "a\0b:1", "[]:1"])
def test_what_is_no_address_proves_nothing(address: str) -> None:
    assert not asyncio.run(is_refused(address))


def test_all_addresses_of_a_name_must_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(None, None, None, None, (ip, 0)) for ip in ("10.0.0.1", "10.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    Wire(monkeypatch, **{"10.0.0.1": ConnectionRefusedError(), "10.0.0.2": ConnectionRefusedError()})
    assert asyncio.run(is_refused("node:1"))
    Wire(monkeypatch, **{"10.0.0.1": ConnectionRefusedError(), "10.0.0.2": None})
    assert not asyncio.run(is_refused("node:1"))


def test_a_stalled_resolver_takes_no_longer_than_a_knock_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many names too: neither asyncio's pool nor the end of the loop waits for them, and threads are bounded."""
    release = threading.Event()
    monkeypatch.setattr(probe_address, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(20) and [])

    async def ask() -> None:
        asking = [asyncio.ensure_future(is_refused(f"dead-{n}:1")) for n in range(100)]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(int, "7") == 7
        assert not any(await asyncio.gather(*asking))
        assert len([t for t in threading.enumerate() if t.name == "paceline-lookup"]) == probe_address._MOST_LOOK_UPS

    start = time.monotonic()
    try:
        asyncio.run(ask())
        assert time.monotonic() - start < 10
    finally:
        release.set()
    for thread in threading.enumerate():
        if thread.name == "paceline-lookup":
            thread.join(20)
    assert probe_address._look_ups.acquire(blocking=False), "each look-up gives its place back"
    probe_address._look_ups.release()
