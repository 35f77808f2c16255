"""What strangers can make grpc log of their calls, which it reads before any token is looked at."""

from __future__ import annotations

import asyncio
import logging
import struct
from contextlib import closing

import pytest

from paceline_server import Coordinator, ServerSettings
from support.coordinator import run
from support.http2 import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    call_headers,
    connect,
    frame,
    referred,
)

GET = b"/pacelinepb.v1.StoreService/Get"
FIELDS = {
    b":method": b"POST",
    b":scheme": b"http",
    b":path": GET,
    b":authority": b"localhost",
    b"content-type": b"application/grpc",
    b"te": b"trailers",
    b"x": b"\xff" * 100,
}
CANCEL = struct.pack(">I", 8)
PATIENCE = 60.0


def calls(address: str) -> None:
    """Some have headers that are no UTF-8, a field again and again; others have such a method, and some are cancelled.

    Returns once the last one, which is sound, is answered.
    """
    first, again = referred(FIELDS, 20)
    path = call_headers(b"/\xff\x1b[2J")
    blocks = [first, *[again] * 50, *[path] * 100, call_headers(GET)]
    sent = PREFACE + frame(SETTINGS, 0, 0, b"")
    for number, block in enumerate(blocks):
        sent += frame(HEADERS, END_HEADERS, 2 * number + 1, block)
        sent += frame(RST_STREAM, 0, 2 * number + 1, CANCEL) if 101 <= number < 151 else b""
    ended, data = set[int](), b""
    with closing(connect(address, PATIENCE)) as there:
        there.sendall(sent)
        while len(ended) < len(blocks) - 50:
            more = there.recv(1 << 18)
            assert more, "the coordinator has hung up"
            data += more
            while len(data) >= 9 and len(data) >= (end := 9 + int.from_bytes(data[:3], "big")):
                if data[3] == HEADERS and data[4] & END_STREAM:
                    ended.add(int.from_bytes(data[5:9], "big"))
                data = data[end:]


def test_calls_that_grpc_cannot_read_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of each of these calls, some 30 to 100 bytes, it would log 1 to 16 KB."""

    async def main() -> None:
        coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0", token="a-token-that-nobody-guesses"))
        address = await coordinator.start()
        try:
            await asyncio.to_thread(calls, address)
        finally:
            await coordinator.stop(grace=0.2)

    with caplog.at_level(logging.INFO):
        run(main)
    said = [record for record in caplog.records if record.name.startswith("grpc")]
    assert len(said) <= 3, "one of each kind, in a minute"
    assert not any(part in record.getMessage() for record in said for part in ("\\xff", "\xff", "\x1b"))
    assert "Traceback" not in capfd.readouterr().err
