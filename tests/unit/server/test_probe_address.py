"""Knocking: a refused connection proves death, bytes prove life, and no name holds the coordinator up."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
import time
from typing import Any

import pytest

from paceline_server import probe_address
from paceline_server.probe_address import answers, greeting, is_refused


class Wire:
    """In place of `asyncio.open_connection`: which addresses refuse, answer, cannot be reached, or say nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **ends: Exception | bytes | asyncio.Event | None) -> None:
        self._ends = ends
        self.sent = b""
        self.tried: list[str] = []
        monkeypatch.setattr(asyncio, "open_connection", self._open)

    async def _open(self, host: str, port: int) -> Any:
        end = self._ends[host]
        self.tried.append(host)
        if isinstance(end, Exception):
            raise end
        if isinstance(end, asyncio.Event):
            await end.wait()
        wire = self

        class Reader:
            async def read(self, most: int) -> bytes:
                if end is None:
                    await asyncio.Event().wait()
                assert isinstance(end, bytes)
                return end[:most]

        class Writer:
            def write(self, data: bytes) -> None:
                wire.sent += data

            def close(self) -> None:
                pass

        return Reader(), Writer()


def test_is_refused_is_true_only_for_a_refused_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"10.0.0.1": ConnectionRefusedError(), "10.0.0.2": None, "10.0.0.3": OSError("no route"), "::1": None}
    Wire(monkeypatch, **ends)
    assert asyncio.run(is_refused("10.0.0.1:1"))
    for address in ("10.0.0.2:1", "10.0.0.3:1", "[::1]:1"):
        assert not asyncio.run(is_refused(address))


def test_answers_is_true_only_when_bytes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes connections for a process that is stopped, and ends those of one that is dead."""
    ends = {"10.0.0.1": b"\0\0\x18", "10.0.0.2": None, "10.0.0.3": b"", "10.0.0.4": ConnectionRefusedError()}
    wire = Wire(monkeypatch, **ends, **{"10.0.0.5": OSError("no route"), "10.0.0.6": ConnectionResetError()})
    assert asyncio.run(answers("10.0.0.1:1", b"hello"))
    assert wire.sent == b"hello"
    for host in (2, 3, 4, 5, 6):
        assert not asyncio.run(answers(f"10.0.0.{host}:1", b"", timeout_s=0.05))


def name(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Every name has these addresses."""
    found = [(None, None, None, None, (ip, 0)) for ip in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


NO_ROUTE = OSError(errno.ENETUNREACH, "Network is unreachable")


@pytest.mark.parametrize("other", [ConnectionRefusedError(), NO_ROUTE, TimeoutError()])
def test_answers_is_true_if_one_address_of_a_name_answers(monkeypatch: pytest.MonkeyPatch, other: Exception) -> None:
    """A door listens at one of them. The others refuse, or no way leads there."""
    name(monkeypatch, "10.0.0.1", "10.0.0.2", "10.0.0.3")
    Wire(monkeypatch, **{"10.0.0.1": other, "10.0.0.2": b"\0", "10.0.0.3": other})
    assert asyncio.run(answers("node:1", b""))


def test_an_answer_does_not_wait_for_silent_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    name(monkeypatch, "10.0.0.1", "10.0.0.2", "10.0.0.3")

    async def ask() -> bool:
        Wire(monkeypatch, **{"10.0.0.1": asyncio.Event(), "10.0.0.2": b"\0", "10.0.0.3": asyncio.Event()})
        answer = await asyncio.wait_for(answers("node:1", b"", timeout_s=600.0), 10.0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:  # nobody asks any more
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, 10.0)
        return answer

    assert asyncio.run(ask())


def test_the_number_of_addresses_tried_per_name_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a descriptor. Those that were not tried prove nothing."""
    addresses = [f"10.0.0.{n}" for n in range(100)]
    name(monkeypatch, *addresses)
    wire = Wire(monkeypatch, **dict.fromkeys(addresses, ConnectionRefusedError()))
    assert not asyncio.run(is_refused("node:1"))
    assert len(wire.tried) == probe_address._MOST_ADDRESSES


def test_a_greeting_begins_a_tls_handshake() -> None:
    assert greeting(tls=False) == b""
    assert greeting(tls=True)[:2] == b"\x16\x03"  # a handshake record (RFC 8446, 5.1)


@pytest.mark.parametrize("address", ["", ":", "host", "host:", "host:x", "a..b:1", f"{'x' * 64}:1", "a\0b:1", "[]:1"])
def test_a_malformed_address_is_not_reported_as_refused(address: str) -> None:
    assert not asyncio.run(is_refused(address))


def test_a_port_with_too_many_digits_is_not_reported_as_refused() -> None:
    assert not asyncio.run(is_refused(f"127.0.0.1:{'1' * 5000}"))


def test_is_refused_requires_all_addresses_of_a_name_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may listen at one that this host cannot reach."""
    name(monkeypatch, "10.0.0.1", "10.0.0.2")
    Wire(monkeypatch, **{"10.0.0.1": ConnectionRefusedError(), "10.0.0.2": ConnectionRefusedError()})
    assert asyncio.run(is_refused("node:1"))
    for other in (None, NO_ROUTE, TimeoutError()):
        Wire(monkeypatch, **{"10.0.0.1": ConnectionRefusedError(), "10.0.0.2": other})
        assert not asyncio.run(is_refused("node:1"))


def test_a_stalled_resolver_does_not_exceed_the_probe_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many names too: neither asyncio's pool nor the end of the loop waits for them, and threads are bounded."""
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(20) and [])

    async def ask() -> None:
        asking = [asyncio.ensure_future(is_refused(f"dead-{n}:1", timeout_s=0.05)) for n in range(100)]
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


@pytest.mark.parametrize(
    ("own", "address", "is_own"),
    [
        ("10.0.0.1", "10.0.0.1:7400", True),
        ("10.0.0.1", "[::ffff:10.0.0.1]:7400", True),
        ("::ffff:10.0.0.1", "10.0.0.1:7400", True),
        ("::ffff:0.0.0.0", "127.0.0.5:7400", True),
        ("10.0.0.1", "10.0.0.1:7401", False),
        ("10.0.0.1", "10.0.0.2:7400", False),
        ("10.0.0.1", "0.0.0.0:7400", True),
        ("0.0.0.0", "127.0.0.5:7400", True),
        ("0.0.0.0", "192.0.2.1:7400", False),
        ("::", "127.0.0.5:7400", True),
        ("::", "192.0.2.1:7400", False),
    ],
)
def test_an_address_of_the_coordinator_itself_counts_as_refused(
    own: str, address: str, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = address.rpartition(":")[0].strip("[]")
    Wire(monkeypatch, **{host: b"\0\0\x18"})
    assert asyncio.run(answers(address, b"", {(own, 7400)})) is not is_own
    assert asyncio.run(is_refused(address, {(own, 7400)})) is is_own
