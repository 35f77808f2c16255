"""The coordinator's HTTP server: who is let in, what jobs, metrics and streams say, and that watching takes little."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline_server import Coordinator, ServerSettings
from paceline_server._grpc import aio
from paceline_server.web import stream
from paceline_server.web.server import HttpServer
from paceline_server.web.web_limits import WebLimits
from pacelinepb.v1 import session_pb2
from support.certificates import make_folder, renew
from support.coordinator import PATIENCE, RawSession, duration, run
from support.web_server import web_server

ALL, READS, ONE = "the-token-for-all-0123456789", "the-token-to-read-0123456789", "the-token-for-one-0123456789"

Labels = frozenset[tuple[str, str]]


class Page:
    """A coordinator with HTTP, and one who asks.

    Args:
        coordinator: has started.
        server: of the page.
        http: sends requests.
        channel: to the coordinator.
    """

    def __init__(
        self, coordinator: Coordinator, server: HttpServer, http: aiohttp.ClientSession, channel: aio.Channel
    ) -> None:
        self.coordinator = coordinator
        self.server = server
        self.port = server.listening[0][1]
        self.http = http
        self.channel = channel
        self.dispatcher = coordinator._dispatcher

    async def get(self, path: str, status: int = 200, **how: Any) -> Any:
        """The JSON of a path."""
        async with self.http.get(path, **how) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def scrape(self, **how: Any) -> dict[str, dict[Labels, float]]:
        """The metrics as Prometheus reads them: values by labels, by the name of the sample."""
        async with self.http.get("/metrics", **how) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/plain"
            found: dict[str, dict[Labels, float]] = {}
            for family in text_string_to_metric_families(await answer.text()):
                for sample in family.samples:
                    values = found.setdefault(sample.name, {})
                    labels = frozenset(sample.labels.items())
                    assert labels not in values, f"{sample.name} twice"
                    values[labels] = sample.value
            return found

    async def until(self, path: str, seen: Callable[[Any], bool]) -> Any:
        """What a path has, once the job "digits" is as wanted in a message of its stream."""
        async with self.http.get("/api/stream?job=digits") as answer:
            while not seen((await messages(answer, 1))[0][1]["job"]):
                pass
        return await self.get(path)


@asynccontextmanager
async def page(**settings: Any) -> AsyncIterator[Page]:
    usual = {"listen": "127.0.0.1:0", "http": "127.0.0.1:0", "settle_time": 1.0}  # a line's workers are in one view
    coordinator = Coordinator(ServerSettings(**usual | settings))
    address = await coordinator.start()
    try:
        async with aio.insecure_channel(address) as channel, aiohttp.ClientSession(coordinator.http_url) as http:
            assert coordinator._http is not None
            yield Page(coordinator, coordinator._http, http, channel)
    finally:
        await coordinator.stop(grace=0.2)


@asynccontextmanager
async def limited_page(limits: WebLimits, **settings: Any) -> AsyncIterator[Page]:
    """The page of another HTTP server of the coordinator, with these limits."""
    async with (
        page(**settings) as p,
        web_server(p.coordinator, limits) as (server, url),
        aiohttp.ClientSession(url) as http,
    ):
        yield Page(p.coordinator, server, http, p.channel)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def of(**labels: str) -> Labels:
    return frozenset(labels.items())


class Line:
    """A job with members on raw stubs, whose generation has a base; each member is its own process on host-a."""

    def __init__(self, channel: aio.Channel, job: str = "digits", most: int = 4) -> None:
        self.channel = channel
        self.job = job
        self.most = most
        self.members: list[RawSession] = []
        self.generation = 0
        self.beat: dict[str, Any] = {}
        self._pids = 0

    async def register(self) -> RawSession:
        self._pids += 1
        return await RawSession.register(
            self.channel, self.job, pid=self._pids, least=1, most=self.most, failure_timeout=30.0
        )

    async def begin(self, world: int) -> None:
        """The members register, and agree on a base: generation 2 begins."""
        self.members = [await self.register() for _ in range(world)]
        views = [await member.view() for member in self.members]
        self.members = [member for _, member in sorted(zip((v.rank for v in views), self.members, strict=True))]
        self.generation = 1
        await self.meet(self.members, 0)

    async def meet(self, members: list[RawSession], step: int, newcomers: list[RawSession] | None = None) -> None:
        """All stop after a step, and those who come are ready; the next generation begins with all of them."""
        tag = session_pb2.Tag(generation=self.generation if step else 0, step=step)
        fields: dict[str, Any] = {"tag": tag, "manifest": b"m", "fingerprint": b"" if step else b"f"}
        for newcomer in newcomers or []:
            await newcomer.send(meet=session_pb2.Meet(tag=session_pb2.Tag(), manifest=b"m", fingerprint=b"f"))
        for member in members:
            await member.send(meet=session_pb2.Meet(generation=self.generation, holds_base=True, **fields))
        everyone = [*members, *(newcomers or [])]
        views = [await last(member) for member in everyone]
        self.members = [member for _, member in sorted(zip((v.rank for v in views), everyone, strict=True))]
        self.generation = views[0].generation

    async def step(self, number: int, **beat: Any) -> None:
        """The word of a step completes, and all members say so; counters that are not given stay as they were."""
        self.beat |= beat
        for member in self.members:
            await member.heartbeat(step=number, operation=number, **self.beat)

    async def kill(self, member: RawSession, pid: int) -> None:
        """A launcher says that a member was killed; the others hear the verdict."""
        process = session_pb2.ProcessIdentity(host="host-a", pid=pid)
        await member.stub.ReportExit(session_pb2.ReportExitRequest(job=self.job, process=process, exit_code=-9))
        self.members.remove(member)
        for other in self.members:
            await until_kind(other, "verdict")


async def until_kind(member: RawSession, kind: str) -> Any:
    async with asyncio.timeout(PATIENCE):
        while (message := await member.read()).WhichOneof("event") != kind:
            pass
    return getattr(message, kind)


async def last(member: RawSession) -> session_pb2.ViewFormed:
    found: session_pb2.ViewFormed = await until_kind(member, "view_formed")
    return found


# Who is let in --------------------------------------------------------------------------------------------------------


def test_without_tokens_only_local_host_headers_are_accepted() -> None:
    async def main() -> None:
        async with page() as p:
            assert await p.get("/api/jobs") == {"jobs": []}
            session = await p.get("/api/session")
            assert (session["needs_token"], session["may_drain"]) == (False, True)
            for host in ("localhost:1", "127.0.0.1", "[::1]:80"):
                await p.get("/api/jobs", headers={"Host": host})
            for host in ("evil.example", "evil.example:7401", "localhost.evil.example", "127.0.0.1.evil.example", ""):
                refused = await p.get("/api/jobs", 403, headers={"Host": host})
                assert refused["error"].startswith("this coordinator asks for no token, so it answers only to")

    run(main)


def test_without_tokens_a_foreign_host_header_is_refused() -> None:
    async def main() -> None:
        async with page(http="0.0.0.0:0") as p:
            await RawSession.register(p.channel, "digits", least=1, most=1)
            for host in ("localhost:1", "192.0.2.1:7401", f"{socket.gethostname().upper()}:7401"):
                await p.get("/api/jobs", headers={"Host": host})
            foreign = {"Host": "evil.example", "Origin": "http://evil.example"}
            assert "not to 'evil.example'" in (await p.get("/api/jobs", 403, headers=foreign))["error"]
            async with p.http.post("/api/jobs/digits/drain", json={"members": []}, headers=foreign) as answer:
                assert answer.status == 403

    run(main)


def test_http_respects_the_roles_and_jobs_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(f"{ALL}\n{READS} role=read\n{ONE} one\n")

    async def main() -> None:
        async with page(token_file=file) as p:
            for job in ("one", "two", "one/nodes"):
                await RawSession.register(p.channel, job, least=1, most=1, token=ALL)
            for path in ("/api/jobs", "/api/jobs/one", "/api/jobs/one/events", "/api/stream", "/metrics"):
                for headers in ({}, bearer("x" * 20), {"Authorization": f"Basic {ALL}"}):
                    refused = await p.get(path, 401, headers=headers)
                    assert refused["error"].startswith("this coordinator asks for a token")
            names = {
                token: [job["name"] for job in (await p.get("/api/jobs", headers=bearer(token)))["jobs"]]
                for token in (ALL, READS, ONE)
            }
            assert names == {
                ALL: ["one", "one/nodes", "two"],
                READS: ["one", "one/nodes", "two"],
                ONE: ["one", "one/nodes"],
            }
            assert (await p.get("/api/jobs/one%2Fnodes", headers=bearer(ONE)))["job"]["name"] == "one/nodes"
            await p.get("/api/jobs/two", 403, headers=bearer(ONE))
            await p.get("/api/stream?job=two", 403, headers=bearer(ONE))
            seen = {dict(labels)["job"] for labels in (await p.scrape(headers=bearer(ONE)))["paceline_job_step"]}
            assert seen == {"one", "one/nodes"}
            may = [
                (await p.get("/api/session", headers=headers))["may_drain"]
                for headers in ({}, bearer("x" * 20), bearer(READS), bearer(ONE), bearer(ALL))
            ]
            assert may == [False, False, False, True, True]
            await p.get("/api/jobs", headers=bearer(ALL) | {"Host": "monitor.example"})  # a token is in no foreign page
            for path in ("/healthz", "/readyz"):
                async with p.http.get(path) as answer:
                    assert (answer.status, await answer.text()) == (200, "ok\n"), "probes have no tokens"

    run(main)


def test_drain_needs_an_operator_token_and_the_pages_origin(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(f"{ALL}\n{READS} role=read\n{ONE} one\n")

    async def main() -> None:
        async with page(token_file=file) as p:
            members = [
                await RawSession.register(p.channel, "digits", pid=pid, failure_timeout=60.0, token=ALL)
                for pid in (1, 2)
            ]
            ranks = [(await member.view()).rank for member in members]
            members = [member for _, member in sorted(zip(ranks, members, strict=True))]

            async def post(status: int, body: Any = None, token: str = ALL, **headers: str) -> Any:
                data = json.dumps({"members": ["1"]} if body is None else body) if not isinstance(body, str) else body
                whole = {"Content-Type": "application/json", **bearer(token), **headers}
                async with p.http.post("/api/jobs/digits/drain", data=data, headers=whole) as answer:
                    assert answer.status == status, await answer.text()
                    return await answer.json()

            await post(403, token=READS)
            await post(403, token=ONE)
            await post(401, token="x" * 20)
            await post(400, **{"Content-Type": "text/plain"})
            await post(403, Origin="http://evil.example")
            await post(403, Origin="null")
            proxied = {"Origin": "https://page.example", "Host": "page.example"}
            await post(404, {"members": ["7"]}, **proxied)  # it was let in
            await post(403, **proxied | {"Host": "page.example:7401"})
            for body in ("{", "[]", "{}", '{"members": "1"}', '{"members": [1]}', "[" * 10_000):
                assert (await post(400, body))["error"].startswith("the body")
            await post(413, "x" * 70_000)
            await post(404, {"members": ["7"]})
            origin = p.coordinator.http_url.rstrip("/")
            assert await post(200, Origin=origin) == {"member_ids": [members[1].member_id]}
            assert (await members[1].next("drain")).reason == "an operator asked for it (paceline drain)"
            assert set((await post(200, {"members": []}))["member_ids"]) == {each.member_id for each in members}
            events = (await p.get("/api/jobs/digits/events", headers=bearer(READS)))["events"]
            assert [event["text"] for event in events if event["kind"] == "drained"] == [
                "rank 1 (host-a, pid 2) is to leave: an operator asked for it (paceline drain)",
                "rank 0 (host-a, pid 1), rank 1 (host-a, pid 2) are to leave: "
                "an operator asked for it (paceline drain)",
            ]

    run(main)


def test_errors_have_messages_and_no_outside_file_is_served() -> None:
    async def main() -> None:
        async with page() as p:
            assert (await p.get("/api/jobs/nobody", 404))["error"].startswith("there is no job 'nobody'")
            assert (await p.get("/api/stream?job=nobody", 404))["error"].startswith("there is no job 'nobody'")
            assert (await p.get("/api/jobs/a/events?after=x", 400))["error"].startswith("after must be a whole number")
            for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/nope", "/api"):
                assert (await p.get(path, 404))["error"]
            async with p.http.post("/metrics") as answer:
                assert answer.status == 405
                assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")

    run(main)


def test_a_stopping_coordinator_is_not_ready_and_ends_streams() -> None:
    async def main() -> None:
        async with page() as p, p.http.get("/api/stream") as answer:
            await answer.content.readuntil(b"\n\n")
            p.dispatcher.draining = True
            assert (await p.get("/readyz", 503))["error"] == "the coordinator is stopping"
            metrics = await p.scrape()
            assert metrics["paceline_coordinator_leader"][of()] == 0
            assert metrics["paceline_refusals_total"][of(reason="draining")] == 0, "probes are not counted"
            await p.coordinator.stop(grace=0.2)
            async with asyncio.timeout(PATIENCE):
                await answer.content.read()

    run(main)


def test_the_page_uses_the_coordinators_certificate(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tls")

    async def certificate(p: Page) -> bytes:
        lax = ssl.create_default_context()
        lax.check_hostname, lax.verify_mode = False, ssl.CERT_NONE
        port = int(p.coordinator.http_url.split(":")[2].strip("/"))
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=lax)
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return shown

    async def days_left(p: Page, trusting: ssl.SSLContext) -> float:
        return ((await p.scrape(ssl=trusting))["paceline_certificate_expiry_time_seconds"][of()] - time.time()) / 86_400

    async def main() -> None:
        trusting = ssl.create_default_context(cafile=folder.path / "ca.pem")
        files = {"tls_cert": folder.path / "coordinator.pem", "tls_key": folder.path / "coordinator.key"}
        async with page(**files) as p:
            assert p.coordinator.http_url.startswith("https://")
            assert await p.get("/api/jobs", ssl=trusting) == {"jobs": []}
            first = await certificate(p)
            assert (await days_left(p, trusting)) == pytest.approx(1, abs=0.01)
            renew(folder, "coordinator", days=2)
            keeper = p.coordinator._certificates
            assert keeper is not None
            keeper.held = keeper._paths.read(keeper.held)  # as a look at the files does, every 10 s
            assert await certificate(p) != first, "new connections get the new certificate"
            assert (await days_left(p, trusting)) == pytest.approx(2, abs=0.01)
        async with page(**files, tls_ca=folder.path / "ca.pem") as p:
            with pytest.raises(aiohttp.ClientError):
                await p.get("/api/jobs", ssl=trusting)
            trusting.load_cert_chain(folder.path / "member.pem", folder.path / "member.key")
            assert await p.get("/api/jobs", ssl=trusting) == {"jobs": []}

    run(main)


def test_an_http_port_in_use_is_named_in_the_error() -> None:
    async def main() -> None:
        async with page() as p:
            port = p.coordinator.http_url.split(":")[2].strip("/")
            second = Coordinator(ServerSettings(listen="127.0.0.1:0", http=f"127.0.0.1:{port}"))
            with pytest.raises(OSError, match=f"127.0.0.1:{port} is in use"):
                await second.start()

    run(main)


def test_http_connections_are_bounded() -> None:
    async def main() -> None:
        async with limited_page(WebLimits(most_connections=3)) as p:
            held = [await asyncio.open_connection("127.0.0.1", p.port) for _ in range(3)]
            assert await p.get("/api/jobs") == {"jobs": []}
            async with asyncio.timeout(PATIENCE):
                assert await held[0][0].read() == b"", "the oldest gives way"
            assert not any(reader.at_eof() for reader, _ in held[1:])
            for _, writer in held:
                writer.close()

    run(main)


def test_tls_handshakes_are_bounded(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tls")
    files = {"tls_cert": folder.path / "coordinator.pem", "tls_key": folder.path / "coordinator.key"}
    trusting = ssl.create_default_context(cafile=folder.path / "ca.pem")

    async def main() -> None:
        async with limited_page(WebLimits(most_connections=3, handshake_s=3_600.0), **files) as p:
            silent = [await asyncio.open_connection("127.0.0.1", p.port) for _ in range(3)]
            assert await p.get("/api/jobs", ssl=trusting) == {"jobs": []}
            async with asyncio.timeout(PATIENCE):
                assert await silent[0][0].read() == b"", "the oldest gives way"
            assert not any(reader.at_eof() for reader, _ in silent[1:])
            for _, writer in silent:
                writer.close()
        async with limited_page(WebLimits(handshake_s=0.2), **files) as p:
            reader, writer = await asyncio.open_connection("127.0.0.1", p.port)
            async with asyncio.timeout(PATIENCE):
                assert await reader.read() == b"", "nor does a handshake last for ever"
            writer.close()

    run(main)


# What is said ---------------------------------------------------------------------------------------------------------


def test_kills_joins_and_drains_are_counted_without_stale_series() -> None:
    async def main() -> None:
        async with page() as p:
            line = Line(p.channel)
            await line.begin(3)
            for number in (1, 2, 3):
                sent = {"shm": 100 * number, "tcp": 1}
                kept = {"checkpoint_step": 1, "checkpoints": 1, "checkpoint_time": duration(0.4)}
                counted = {"samples": 10 * number, "sent_bytes": sent, "in_collectives": duration(0.5 * number)}
                fetched = {"state_bytes": 1000, "state_time": duration(0.25)}
                await line.step(number, checkpoint_failures=number // 3, **kept, **counted, **fetched)
            await p.until("/api/jobs/digits", lambda job: job["totals"]["samples"] == 90)
            before = await p.scrape()
            assert before["paceline_job_workers"][of(job="digits", standing="training")] == 3
            assert len(before["paceline_member_lag_seconds"]) == 3
            await line.kill(line.members[2], 3)
            assert "paceline_member_lag_seconds" not in await p.scrape(), (
                "nobody waits for another in a void generation"
            )
            await line.meet(line.members, 2)
            await line.step(3, undone=1)
            await line.step(4, samples=40)
            newcomer = await line.register()
            await newcomer.next("running")
            await line.meet(line.members, 4, [newcomer])
            await line.step(5)
            await line.step(6)
            leaver = line.members[2]
            async with p.http.post("/api/jobs/digits/drain", json={"members": [leaver.member_id]}) as answer:
                assert answer.status == 200
            stop = session_pb2.Meet(
                generation=line.generation,
                tag=session_pb2.Tag(generation=line.generation, step=6),
                holds_base=True,
                manifest=b"m",
                leaving=True,
            )
            await leaver.send(meet=stop)
            line.members.remove(leaver)
            await line.meet(line.members, 6)
            await until_kind(leaver, "dismissed")
            await leaver.send(leave=session_pb2.Leave())
            await until_kind(leaver, "left")
            await line.step(7)
            await line.step(8)
            detail = await p.until("/api/jobs/digits", lambda job: job["totals"]["step"] == 7)
            after = await p.scrape()
            job = {"job": "digits"}
            assert after["paceline_steps_total"] == {
                of(**job, outcome="committed"): 7,
                of(**job, outcome="undone"): 1,
            }
            assert {
                dict(key)["reason"]: value for key, value in after["paceline_generations_total"].items() if value
            } == {
                "began": 2,
                "lost": 1,
                "joined": 1,
                "drained": 1,
            }
            assert {
                dict(key)["how"]: value for key, value in after["paceline_members_lost_total"].items() if value
            } == {"exited": 1}
            for name in ("detection", "recovery", "join"):
                assert after[f"paceline_{name}_seconds_count"][of(**job)] == 1, name
            assert after["paceline_sent_bytes_total"][of(**job, kind="tcp")] == 4, "one of each, of the killed one too"
            assert after["paceline_state_transfer_bytes_total"] == {of(**job): 4000}, "of the one that was killed too"
            assert after["paceline_state_transfer_seconds_total"] == {of(**job): 1.0}
            assert set(after["paceline_member_lag_seconds"]) == {of(**job, rank="0"), of(**job, rank="1")}
            assert after["paceline_checkpoint_last_step"] == {of(**job): 1}
            assert after["paceline_checkpoint_seconds_count"] == {of(**job): 1}, "all have written it"
            assert after["paceline_checkpoint_seconds_sum"][of(**job)] == pytest.approx(0.4)
            assert after["paceline_checkpoint_failures_total"] == {of(**job): 4}, (
                "of the killed one, the others, a newcomer"
            )
            workers = {dict(key)["standing"]: value for key, value in after["paceline_job_workers"].items()}
            assert workers == {"training": 2, "waiting": 0, "spare": 0, "silent": 0, "leaving": 0}
            assert (after["paceline_job_workers_min"], after["paceline_job_workers_max"]) == (
                {of(**job): 1},
                {of(**job): 4},
            )
            assert after["paceline_job_generation"] == {of(**job): 5}
            falls = {
                (name, key): (value, after[name].get(key))
                for name, values in before.items()
                for key, value in values.items()
                if name.endswith(("_total", "_count", "_sum", "_bucket")) and not after[name].get(key, -1) >= value
            }
            assert not falls, "no counter falls, and none vanishes"
            assert [(gone["rank"], gone["pid"], gone["how"]) for gone in detail["gone"]] == [
                (2, 3, "was killed by SIGKILL"),
                (2, 4, "left after a drain"),
            ]
            kinds = [event["kind"] for event in detail["events"] if event["kind"] != "reason"]
            assert kinds == [
                "view",
                "joined",
                "view",
                "checkpoint",
                "verdict",
                "lost",
                "view",
                "view",
                "joined",
                "drained",
                "view",
                "left",
            ]
            for member in line.members:
                await member.send(leave=session_pb2.Leave())
            await p.until("/api/jobs", lambda job: job["world_size"] == 0)
            over = await p.scrape()
            assert "paceline_member_lag_seconds" not in over, "series of members end with them"

    run(main)


def test_the_metrics_reference_names_exactly_the_exported_metrics() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    table = text[text.index("| Metric |") : text.index("Goodput is the share")]

    async def main() -> set[str]:
        async with page() as p:
            line = Line(p.channel)
            await line.begin(2)
            await line.step(1, sent_bytes={"shm": 1}, checkpoint_failures=1, logged={"loss": 1.0})
            await p.until("/api/jobs/digits", lambda job: job["totals"]["sent_bytes"])
            names = await p.scrape()
            with_tls = "paceline_certificate_expiry_time_seconds"
            return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names} | {with_tls}

    assert set(re.findall(r"(?:paceline|process)_[a-z_]+", table)) == run(main)


def test_events_are_listed_after_a_given_number() -> None:
    async def main() -> None:
        async with page() as p:
            line = Line(p.channel)
            await line.begin(2)
            first = await p.get("/api/jobs/digits/events")
            assert [event["number"] for event in first["events"]] == list(
                range(first["events"][0]["number"], first["next"] + 1)
            )
            assert (await p.get(f"/api/jobs/digits/events?after={first['next']}"))["events"] == []
            await line.kill(line.members[1], 2)
            more = (await p.get(f"/api/jobs/digits/events?after={first['next']}"))["events"]
            assert [event["kind"] for event in more][:2] == ["verdict", "lost"]

    run(main)


def test_a_running_job_says_which_members_are_slow_and_when_it_began() -> None:
    async def main() -> None:
        async with page() as p:
            before = time.time()
            line = Line(p.channel)
            await line.begin(2)
            tally = p.dispatcher.observatory.tally(asyncio.get_running_loop().time(), "digits")
            assert tally is not None
            tally.reports._slow.text = "rank 1 is slow"
            detail = await p.get("/api/jobs/digits")
            assert detail["job"]["reason"].endswith("; rank 1 is slow")
            assert before - 1 <= detail["started"] <= detail["at"] <= time.time() + 1
            await line.kill(line.members[1], 2)
            assert "slow" not in (await p.get("/api/jobs/digits"))["job"]["reason"]

    run(main)


def test_concurrent_requests_share_one_answer_built_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = most = 0

    async def main() -> None:
        async with page() as p:
            await RawSession.register(p.channel, "digits", least=1, most=1)
            routes = p.server._routes
            decide = routes._admin.GetJob

            async def look(*args: Any) -> Any:
                nonlocal inside, most
                inside += 1
                most = max(most, inside)
                for _ in range(100):
                    await asyncio.sleep(0)
                inside -= 1
                return await decide(*args)

            monkeypatch.setattr(routes._admin, "GetJob", look)
            await asyncio.gather(*(p.get("/api/jobs/digits") for _ in range(20)))
            assert most == 1

            built = 0
            begun = asyncio.Event()

            async def build() -> bytes:
                nonlocal built
                built += 1
                number = b"%d" % built
                begun.set()
                await asyncio.sleep(0)
                return number

            first = [asyncio.create_task(routes._shared("key", build)) for _ in range(100)]
            await begun.wait()
            later = [routes._shared("key", build) for _ in range(100)]  # what has begun may lack what they know of
            assert await asyncio.gather(*first, *later) == [b"1"] * 100 + [b"2"] * 100
            assert not routes._built

    run(main)


def test_event_numbers_increase_across_a_coordinator_restart() -> None:
    async def events(after: int) -> Any:
        async with page() as p:
            line = Line(p.channel)
            await line.begin(2)
            return await p.get(f"/api/jobs/digits/events?after={after}")

    async def main() -> None:
        first = await events(0)
        again = await events(first["next"])
        assert [event["kind"] for event in again["events"]] == [event["kind"] for event in first["events"]]
        assert again["events"][0]["number"] > first["next"]
        assert again["next"] < 2**53, "the page can count so far"

    run(main)


async def messages(answer: aiohttp.ClientResponse, count: int) -> list[tuple[str, dict[str, Any]]]:
    """The next events of a stream."""
    found: list[tuple[str, dict[str, Any]]] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < count:
            block = (await answer.content.readuntil(b"\n\n")).decode()
            if not block.startswith(":"):
                event, data = block.strip().split("\n")
                found.append((event.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_stream_is_built_once_for_all_viewers() -> None:
    async def main() -> None:
        async with limited_page(WebLimits(interval_s=0.05)) as p:
            line = Line(p.channel)
            await line.begin(3)
            answers = [await p.http.get("/api/stream?job=digits") for _ in range(20)]
            firsts = [(await messages(answer, 1))[0] for answer in answers]
            (broadcast,) = p.server._routes.broadcasts._all.values()
            assert len(broadcast.viewers) == 20
            built = broadcast.built
            seen = await asyncio.gather(*(messages(answer, 5) for answer in answers))
            assert broadcast.built - built <= 12, "not 100"
            kind, first = firsts[0]
            assert kind == "job"
            assert [member["rank"] for member in first["members"]] == [0, 1, 2]
            for _, later in seen[0]:
                assert "members" not in later
                assert later["members_gone"] == []
                # These members send no heartbeats, and on a slow machine the page says so after a second.
                assert [member for member in later["members_changed"] if not member["silent_s"]] == []
                assert later["job"]["name"] == "digits"
            await line.members[1].heartbeat(operation=7, inside=True, doing="all_reduce")
            changed: list[Any] = []
            while not changed:
                ((_, later),) = await messages(answers[0], 1)
                changed = [member for member in later["members_changed"] if member["operation"]]
            assert [(member["rank"], member["operation"], member["doing"]) for member in changed] == [
                (1, 7, "all_reduce")
            ]
            gone_id = line.members[2].member_id
            await line.kill(line.members[2], 3)
            gone: list[str] = []
            while not gone:
                ((_, later),) = await messages(answers[0], 1)
                gone = later["members_gone"]
            assert gone == [gone_id]
            task = broadcast._task
            for answer in answers:
                answer.close()
            async with asyncio.timeout(PATIENCE):
                await asyncio.wait([task])
            assert not broadcast.viewers, "it is built for nobody"

    run(main)


def test_a_late_viewer_gets_the_first_message_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with limited_page(WebLimits(interval_s=3600.0, longest_s=3600.0)) as p:
            await RawSession.register(p.channel, "digits", least=1, most=1)
            routes = p.server._routes
            decide = routes._admin.GetJob

            async def look(*args: Any) -> Any:
                for _ in range(100):
                    await asyncio.sleep(0)
                return await decide(*args)

            monkeypatch.setattr(routes._admin, "GetJob", look)
            answers = list(await asyncio.gather(*(p.http.get("/api/stream?job=digits") for _ in range(10))))
            for answer in answers:
                assert len((await messages(answer, 1))[0][1]["members"]) == 1
            (broadcast,) = routes.broadcasts._all.values()
            assert len(broadcast.viewers) == 10, "those that come together share one"
            late = await p.http.get("/api/stream?job=digits")
            assert len((await messages(late, 1))[0][1]["members"]) == 1
            assert broadcast.built == 1
            for answer in (*answers, late):
                answer.close()

    run(main)


def test_a_viewer_that_joins_as_the_last_one_leaves_is_served() -> None:
    async def build() -> dict[str, Any]:
        return {"jobs": []}

    async def main() -> None:
        broadcast = stream.Broadcast("jobs", build)
        for _ in range(2):
            viewer = broadcast.join(lambda: None)
            async with asyncio.timeout(PATIENCE):
                assert await viewer.queue.get()
            broadcast.leave(viewer)

    run(main)


def test_the_stream_interval_grows_with_cost_and_number_of_streams() -> None:
    assert stream.pause(0.001, 1) == 0.5
    assert stream.pause(0.02, 1) == 2.0
    assert stream.pause(0.02, 4) == 8.0
    assert stream.pause(0.02, 100) == 10.0


def test_streams_show_all_jobs_and_end_with_their_job() -> None:
    async def main() -> None:
        async with page() as p:
            await Line(p.channel, "a").begin(1)
            async with p.http.get("/api/stream") as answer:
                ((kind, first),) = await messages(answer, 1)
            assert kind == "jobs"
            assert [job["name"] for job in first["jobs"]] == ["a"]
            session = await RawSession.register(p.channel, "b", least=2, most=2)
            async with p.http.get("/api/stream?job=b") as answer:
                await messages(answer, 1)
                await session.leave()
                last_one: tuple[str, dict[str, Any]] = ("", {})
                while last_one[0] != "end":
                    (last_one,) = await messages(answer, 1)
                assert last_one[1]["error"].startswith("there is no job 'b'")
                assert await answer.content.read() == b""

    run(main)


def test_a_viewer_that_does_not_read_is_disconnected() -> None:
    async def main() -> None:
        async with limited_page(WebLimits(interval_s=0.01, share=1.0)) as p:
            sessions = [
                await RawSession.register(p.channel, pid=pid, least=500, most=500, host="h" * 400, failure_timeout=60.0)
                for pid in range(1, 100)
            ]
            reader, writer = await asyncio.open_connection("127.0.0.1", p.port, limit=1024)
            writer.write(b"GET /api/stream?job=job HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with p.http.get("/api/stream?job=job") as reads:
                await messages(reads, 1)
                (broadcast,) = p.server._routes.broadcasts._all.values()
                operation = 0
                async with asyncio.timeout(2 * PATIENCE):
                    while len(broadcast.viewers) > 1 or not operation:
                        operation += 1
                        for session in sessions:
                            await session.heartbeat(operation=operation)
                        await messages(reads, 1)
                await messages(reads, 3)
            writer.close()
            del reader

    run(main)


def test_viewers_are_bounded() -> None:
    async def main() -> None:
        async with limited_page(WebLimits(most_viewers=4)) as p:
            held = [await p.http.get("/api/stream") for _ in range(2)]
            refused = await p.get("/api/stream", 503)
            assert refused["error"].startswith(
                "no live view: 2 pages of 127.0.0.1 are open, and 2 of all, of 4 at most"
            )
            for answer in held:
                answer.close()

    run(main)


def test_each_of_200_members_adds_one_metric_series() -> None:
    """Sizes, not times: those are measured by bench/http_scale.py."""

    async def main() -> None:
        async with page() as p:
            sessions = [
                await RawSession.register(p.channel, pid=pid, least=200, most=200, failure_timeout=60.0)
                for pid in range(1, 201)
            ]
            for session in sessions:
                await session.view()
            metrics = await p.scrape()
            assert len(metrics["paceline_member_lag_seconds"]) == 200
            others = sum(len(values) for name, values in metrics.items() if name != "paceline_member_lag_seconds")
            assert others < 180

    run(main)
