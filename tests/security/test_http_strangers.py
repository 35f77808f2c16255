"""Strangers at the coordinator's HTTP port, and one job against all: places, logs, pace, probes and streams."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from paceline_server import Coordinator, ServerSettings
from paceline_server.limits import Budget
from paceline_server.storage.base import Change
from paceline_server.storage.memory import MemoryStorage
from paceline_server.web import stream
from paceline_server.web.server import MOST_BYTES, HttpServer
from paceline_server.web.web_limits import USUAL, WebLimits
from support.coordinator import PATIENCE, run
from support.web_server import web_server

PATIENT = replace(USUAL, idle_s=3_600.0, remark_s=3_600.0)
"""Connections end because others come, and a second line of log comes too late, however slow the machine is."""

MINE, THEIRS = "a-token-for-the-neighbour-0123", "a-token-for-the-attacker-01234"
HALF = b"GET /api/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Never"
HALF_A_BODY = (
    b"POST /api/jobs/a/drain HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
)


class Site:
    """A coordinator's HTTP server.

    Attributes:
        server: has started.
        url: of the page.
        port: where it listens.
        writers: of the strangers.
    """

    def __init__(self, server: HttpServer, url: str) -> None:
        self.server = server
        self.url = url
        self.writers: list[asyncio.StreamWriter] = []
        self.port = server.listening[0][1]

    async def stranger(self, says: bytes, address: str = "127.0.0.1") -> asyncio.StreamReader:
        """Connects from an address of this host, and says something; what is answered can be read."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        writer.write(says)
        self.writers.append(writer)
        return reader

    async def ask(self, path: str, token: str = "") -> tuple[int, Any, dict[str, str]]:
        """Sends a request on a connection of its own: the status, the body and the headers of the answer."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with aiohttp.ClientSession(self.url, headers=headers) as http, http.get(path) as answer:
            text = await answer.text()
            is_json = answer.content_type == "application/json"
            return answer.status, json.loads(text) if is_json else text, dict(answer.headers)

    async def end_of_chunks(self, reader: asyncio.StreamReader) -> None:
        """Reads on to the end of a stream whose connection stays."""
        async with asyncio.timeout(PATIENCE):
            await reader.readuntil(b"\r\n0\r\n\r\n")

    async def end_of(self, reader: asyncio.StreamReader) -> bytes:
        """All that comes until the server closes the connection."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await reader.read()
            except ConnectionResetError:
                return b""


@asynccontextmanager
async def site(
    limits: WebLimits = PATIENT, storage: MemoryStorage | None = None, **settings: Any
) -> AsyncIterator[Site]:
    coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0", **settings), storage=storage)
    await coordinator.start()
    try:
        async with web_server(coordinator, limits) as (server, url):
            found = Site(server, url)
            try:
                yield found
            finally:
                for writer in found.writers:
                    writer.close()
    finally:
        await coordinator.stop(grace=0.2)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(f"{MINE} one\n{THEIRS} two\n")
    return file


def test_an_unfinished_request_gives_way_to_a_health_check() -> None:
    """Of 256 strangers the oldest goes for one who comes; the others stay."""

    async def main() -> None:
        async with site() as there:
            strangers = [await there.stranger(HALF) for _ in range(PATIENT.most_connections)]
            assert (await there.ask("/healthz"))[:2] == (200, "ok\n")
            assert await there.end_of(strangers[0]) == b""
            for _ in range(5):
                assert (await there.ask("/readyz"))[:2] == (200, "ok\n")
            assert sum(reader.at_eof() for reader in strangers) <= 6

    run(main)


def test_health_checks_pass_while_strangers_reconnect() -> None:
    async def main() -> None:
        async with site() as there:
            came_again = 0

            async def besiege() -> None:
                nonlocal came_again
                while True:
                    with suppress(ConnectionError):  # the other way to hear that one has to go
                        await (await there.stranger(HALF)).read()
                    came_again += 1

            crowd = [asyncio.create_task(besiege()) for _ in range(PATIENT.most_connections + 20)]
            for _ in range(50):
                assert (await there.ask("/healthz"))[0] == 200
            assert came_again
            assert not any(task.done() for task in crowd)
            for task in crowd:
                task.cancel()
            await asyncio.wait(crowd)

    run(main)


@pytest.mark.parametrize("says", [b"", HALF, HALF_A_BODY], ids=["silent", "half a header", "half a body"])
def test_a_caller_with_a_single_connection_is_not_cut_off(says: bytes) -> None:
    """A scraper that stays connected loses its place only if nobody has more of them."""

    async def main() -> None:
        async with site(replace(PATIENT, most_connections=8)) as there:
            scraper, writer = await asyncio.open_connection("127.0.0.1", there.port, local_addr=("127.0.0.2", 0))
            strangers = [await there.stranger(says) for _ in range(30)]
            for reader in strangers[:22]:
                await there.end_of(reader)
            writer.write(b"GET /api/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert (await scraper.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

    run(main)


def test_connections_with_unread_answers_give_way() -> None:
    many = b"GET /static/uplot/uPlot.esm.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 200

    async def main() -> None:
        async with site(replace(PATIENT, most_connections=4)) as there:
            strangers = [await there.stranger(many) for _ in range(4)]
            for reader in strangers:
                await reader.readexactly(1)  # it is being answered
            for _ in range(4):
                await there.stranger(HALF)
            assert (await there.ask("/healthz"))[0] == 200
            server = there.server._runner.server
            assert server is not None
            assert len(server.connections) <= 5, "nor do they wait to be read"
            for reader in strangers:
                assert len(await there.end_of(reader)) < 200 * 140_000

    run(main)


def test_the_bytes_sent_on_one_connection_are_limited() -> None:
    """So what waits behind a request that is being answered takes little memory."""
    request = b"GET /api/%s HTTP/1.1\r\nHost: [::1]\r\nX-Long: " + b"x" * 8_000 + b"\r\n\r\n"

    async def main() -> None:
        async with site() as there:
            says = request % b"stream" + request % b"session" * (2 * MOST_BYTES // len(request))
            answers = await there.end_of(await there.stranger(says))
            assert answers.count(b"HTTP/1.1 200") <= 1, "the stream did not end by itself"

    run(main)


def test_a_client_that_waits_for_answers_is_closed_with_notice() -> None:
    """Its connection ends with an answer that says so."""
    request = b"GET /api/session HTTP/1.1\r\nHost: [::1]\r\nX-Long: " + b"x" * 4_000 + b"\r\n\r\n"

    async def main() -> None:
        async with site() as there:
            reader = await there.stranger(b"")
            head, sent = b"", 0
            while b"Connection: close" not in head:
                there.writers[0].write(request)
                sent += 1
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(b"}")
            assert sent > 10, "it stays open for many requests"
            assert await there.end_of(reader) == b""

    run(main)


def test_an_ended_stream_counts_as_a_connection_again() -> None:
    async def main() -> None:
        async with site(replace(PATIENT, most_connections=2)) as there:
            says = b"GET /api/stream HTTP/1.1\r\nHost: [::1]\r\n\r\n"
            streams = [await there.stranger(says) for _ in range(2)]
            for reader in streams:
                await reader.readuntil(b"event: jobs")
            await there.server._routes.broadcasts.close()
            for reader in streams:
                await there.end_of_chunks(reader)
            for _ in range(2):
                await there.stranger(HALF)
            for reader in streams:
                assert await there.end_of(reader) == b""

    run(main)


MALFORMED = {
    "a token with CRLF": b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\r\n\r\n",
    "a line end in the token": b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer half\n%s\r\n\r\n",
    "a null character": b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \0%s\r\n\r\n",
    "a header without a name": b"GET / HTTP/1.1\r\nHost: a\r\n: %s\r\n\r\n",
    "a space in a header's name": b"GET / HTTP/1.1\r\nHost: a\r\nBearer %s: x\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s" + b"x" * 10_000 + b"\r\n\r\n",
    "too many headers": b"GET / HTTP/1.1\r\nHost: a\r\n" + b"A: %s\r\n" * 200 + b"\r\n",
    "a method": b"%s / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a later method": b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n%s / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a path": b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n",
    "a host": b"GET //%s:port@[ HTTP/1.1\r\nHost: a\r\n\r\n",
    "a version": b"GET / HTTP/%s\r\nHost: a\r\n\r\n",
    "a length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %s\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\nX: %s\r\n\r\n",
    "a chunk": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%s\r\n",
    "a later chunk": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n%s\r\n\r\n",
    "an encoding": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 30\r\n\r\n%s",
    "an encoding of chunks": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: %s\r\n\r\n",
    "an upgrade": b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: %s\r\n\r\n%s \r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03%s",
}


def test_malformed_requests_are_logged_once_without_the_token(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Twenty of each kind, with a token in them, at the level of the log that shows most."""
    caplog.set_level(logging.DEBUG, logger="")
    for name in ("aiohttp.server", "aiohttp.access", "aiohttp.web", "aiohttp.internal", "asyncio"):
        caplog.set_level(logging.DEBUG, logger=name)

    async def main() -> None:
        async with site(token_file=tokens) as there:
            for kind, says in MALFORMED.items():
                for _ in range(20):
                    reader = await there.stranger(says.replace(b"%s", MINE.encode()))
                    async with asyncio.timeout(PATIENCE):
                        answer = await reader.readuntil(b"\r\n\r\n")
                    there.writers[-1].write_eof()
                    answer += await there.end_of(reader)
                    is_refused = answer.split(b" ", 2)[1] == b"400"
                    assert MINE.encode() not in answer or not is_refused, kind  # other refusals name the path
                    assert b"CRLF" in answer or not kind.startswith("a token"), "what may be wrong is said"
            assert (await there.ask("/api/jobs", MINE))[0] == 200

    run(main)
    text = "\n".join(repr(record.__dict__) for record in caplog.records)
    assert MINE not in text
    assert MINE not in caplog.text
    assert not [record.exc_text for record in caplog.records if record.exc_text]
    said = [record.getMessage() for record in caplog.records if record.name.startswith(("paceline", "aiohttp"))]
    lines = Counter(line.partition(": ")[0] for line in said if "cannot be read" in line)
    assert lines, "they are logged"
    assert set(lines.values()) == {1}, lines


def test_requests_are_rate_limited_by_job_or_address(tokens: Path) -> None:
    """With a token its job pays, without one the address; probes cost nothing, and another job notices nothing."""
    slow = replace(PATIENT, request_rate=1e-3, request_burst=5, patience_s=1e-3)

    async def main() -> None:
        async with site(slow, token_file=tokens) as there:
            for token, path, status in (
                (THEIRS, "/api/jobs", 200),
                ("", "/api/session", 200),
                ("x" * 20, "/metrics", 429),
            ):
                answers = [await there.ask(path, token) for _ in range(8)]
                served = 0 if status == 429 else 5
                assert [answer[0] for answer in answers] == [status] * served + [429] * (8 - served)
                assert answers[-1][2]["Retry-After"] == "1"
            assert "job 'two' makes more than" in (await there.ask("/static/page.js", THEIRS))[1]["error"]
            assert (await there.ask("/api/jobs", MINE))[0] == 200
            probes = await there.end_of(await there.stranger(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n" * 8))
            assert probes.count(b"HTTP/1.1 200") == 1, "a probe is the last request of its connection"
            for _ in range(8):
                assert (await there.ask("/healthz"))[0] == (await there.ask("/readyz", THEIRS))[0] == 200

    run(main)


class CountedStorage(MemoryStorage):
    """Counts how often it is asked.

    Attributes:
        asked: how often.
        answers: is set while it answers.
        error: with which it does; None for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.answers = asyncio.Event()
        self.error: Exception | None = None

    def write(self, changes: Sequence[Change]) -> asyncio.Future[None]:
        self.asked += 1

        async def answer() -> None:
            await self.answers.wait()
            if self.error is not None:
                raise self.error

        return asyncio.ensure_future(answer())


def test_readiness_checks_share_one_storage_request() -> None:
    async def look(there: Site, status: int) -> set[str]:
        answers = await asyncio.gather(*(there.ask("/readyz") for _ in range(20)))
        assert {answer[0] for answer in answers} == {status}
        return {str(answer[1]) for answer in answers}

    async def main() -> None:
        storage = CountedStorage()
        async with site(replace(PATIENT, ready_s=0.01, ready_for_s=3_600.0), storage) as there:
            ready = there.server._routes._readiness
            assert await look(there, 503) == {"{'error': 'the storage has not answered for 0.01 s'}"}
            for _ in range(3):
                ready._holds_until = 0.0
                await look(there, 503)
            assert storage.asked == 1, "it is not asked again while it hangs"
            storage.error = OSError("the disk is full")
            storage.answers.set()
            assert ready._asked is not None
            await asyncio.wait({ready._asked})
            ready._holds_until = 0.0
            await look(there, 503)
            assert storage.asked == 2, "it is asked again when it has answered"
        storage.asked = 0
        async with site(replace(PATIENT, ready_s=3_600.0, ready_for_s=3_600.0), storage) as there:
            ready = there.server._routes._readiness
            assert await look(there, 503) == await look(there, 503) == {"{'error': 'the disk is full'}"}
            assert storage.asked == 1, "a failure is shared, too"
            storage.error = None
            ready._holds_until = 0.0
            assert await look(there, 200) == await look(there, 200) == {"ok\n"}
            assert storage.asked == 2

    run(main)


def test_one_job_gets_at_most_half_of_the_streams(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job alone has half of them, and has to leave the others to others; so it is again after all have gone."""
    freed = asyncio.Event()

    class Watched(Budget):
        def add(self, who: Hashable, size: int) -> None:
            super().add(who, size)
            if not self.used:
                freed.set()

    monkeypatch.setattr(stream, "Budget", Watched)
    few = replace(PATIENT, most_viewers=10, most_connections=2)

    async def main() -> None:
        async with site(few, token_file=tokens) as there, aiohttp.ClientSession(there.url) as http:

            async def open_streams(count: int, token: str) -> list[aiohttp.ClientResponse]:
                headers = {"Authorization": f"Bearer {token}"}
                return [await http.get("/api/stream", headers=headers) for _ in range(count)]

            for _ in range(2):
                freed.clear()
                theirs = await open_streams(8, THEIRS)
                assert [answer.status for answer in theirs] == [200] * 5 + [503] * 3
                assert (await theirs[-1].json())["error"].startswith(
                    "no live view: 5 pages of job 'two' are open, and 5 of all, of 10 at most"
                )
                mine = await open_streams(2, MINE)
                assert [answer.status for answer in mine] == [200] * 2
                for answer in theirs[:5] + mine:
                    assert (await answer.content.readuntil(b"\n\n")).startswith(b"event: jobs")
                for answer in theirs + mine:
                    answer.close()
                async with asyncio.timeout(2 * PATIENCE):
                    await freed.wait()

    run(main)
