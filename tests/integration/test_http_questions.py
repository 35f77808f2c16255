"""Questions over HTTP: who may ask members, which members are asked, and that others do not see what workers print."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from paceline._base.activity import FlightRecorder
from paceline._session.answers import record_answer, whole_record
from paceline_server import Coordinator, ServerSettings
from paceline_server._grpc import aio
from paceline_server.security.tokens import Role
from paceline_server.services.authenticate import seen_by
from paceline_server.web.asking import chosen_members
from paceline_server.web.reading import Reader
from paceline_server.web.sending import Sending
from paceline_server.web.web_limits import WebLimits
from pacelinepb.pieces import cut, in_messages
from pacelinepb.v1 import admin_pb2, session_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from support.chrome_format import check_trace
from support.coordinator import PATIENCE, RawSession, run
from support.web_server import web_server

ALL, READS, WORKS, OTHER = (f"the-token-that-{what}-0123456789" for what in ("operates", "reads", "works", "is-other"))

OWN = {"X-Paceline": "page"}

PATHS = ("output?member=0", "stacks", "trace")


class Site:
    """A coordinator with HTTP, whose job "digits" has two members on raw stubs."""

    def __init__(self, coordinator: Coordinator, http: aiohttp.ClientSession, channel: aio.Channel) -> None:
        self.coordinator = coordinator
        self.http = http
        self.channel = channel
        self.members: list[RawSession] = []

    async def begin(self, token: str = "") -> None:
        """The members join, each as a process of host-a, by rank."""
        sessions = [
            await RawSession.register(self.channel, "digits", pid=pid, failure_timeout=60.0, token=token)
            for pid in (1, 2)
        ]
        ranks = [(await session.view()).rank for session in sessions]
        self.members = [session for _, session in sorted(zip(ranks, sessions, strict=True))]

    async def get(self, path: str, status: int = 200, token: str = "", **headers: str) -> Any:
        """The JSON of a path of the job, as the page asks for it."""
        shown = {"X-Paceline": "page"} | headers | ({"Authorization": f"Bearer {token}"} if token else {})
        async with self.http.get(f"/api/jobs/digits/{path}".rstrip("/"), headers=shown) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def answer(self, rank: int, what: session_pb2.Question.ValueType, data: bytes) -> None:
        """A member is asked, and answers."""
        session = self.members[rank]
        asked = await session.next("asked")
        assert asked.what == what
        await self.hand_in(rank, asked, data)

    async def hand_in(self, rank: int, asked: session_pb2.Asked, data: bytes) -> None:
        """A member answers a question."""
        session = self.members[rank]
        message = session_pb2.AnswerAskRequest(
            job="digits", member_id=session.member_id, session_token=session.token, ask=asked.ask, data=cut(data)
        )
        await session.stub.AnswerAsk(iter(in_messages(message)))


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0", http="127.0.0.1:0", **settings))
    address = await coordinator.start()
    try:
        async with aio.insecure_channel(address) as channel, aiohttp.ClientSession(coordinator.http_url) as http:
            yield Site(coordinator, http, channel)
    finally:
        await coordinator.stop(grace=0.2)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(f"{ALL}\n{READS} role=read\n{WORKS} role=worker digits\n{OTHER} other\n")
    return file


def test_only_an_operator_of_the_job_may_ask_over_http(tokens: Path) -> None:
    async def main() -> None:
        async with site(token_file=tokens) as there:
            await there.begin(WORKS)
            for path in PATHS:
                await there.get(path, 401)
                await there.get(path, 401, token="x" * 20)
                for token in (READS, WORKS, OTHER):
                    refused = await there.get(path, 403, token=token)
                    assert refused["error"].startswith("the token ")
            for each in there.members:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await each.next("asked")

    run(main)


@pytest.mark.parametrize("path", PATHS)
def test_a_foreign_page_cannot_make_a_browser_ask(path: str) -> None:
    async def main() -> None:
        async with site() as there:
            await there.begin()
            for where in ("cross-site", "same-site"):
                refused = await there.get(path, 403, **{"Sec-Fetch-Site": where})
                assert refused == {"error": "another page must not ask members"}
            await there.get(path, 403, Host="evil.example")
            address = there.coordinator.http_url + f"api/jobs/digits/{path}"  # not trustworthy: no Sec-Fetch-Site
            async with aiohttp.ClientSession() as browser, browser.get(address) as answer:
                assert answer.status == 403
                assert (await answer.json())["error"].endswith("a header that no other page can send: X-Paceline: page")
            asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "GET"}
            async with there.http.options(f"/api/jobs/digits/{path}", headers=asked) as answer:
                assert answer.status == 405
                assert not [name for name in answer.headers if name.lower().startswith("access-control")]

    run(main)


def test_the_page_gets_the_last_lines_of_a_member() -> None:
    async def main() -> None:
        async with site() as there:
            await there.begin()
            said = {"lines": ["step 1", "\x1b[2Jstep\t2"], "trouble": "", "read_at": 1.0, "sent_at": 1.0}
            id_ = there.members[1].member_id
            for member in ("1", id_):
                asking_ = asyncio.create_task(there.get(f"output?member={member}", **{"Sec-Fetch-Site": "same-origin"}))
                await there.answer(1, session_pb2.QUESTION_OUTPUT, json.dumps(said).encode())
                assert await asking_ == {"lines": ["step 1", "[2Jstep\t2"], "trouble": ""}
            asking_ = asyncio.create_task(there.get("output?member=1"))
            await there.answer(1, session_pb2.QUESTION_OUTPUT, b"\xff no JSON")
            assert await asking_ == {"lines": [], "trouble": "gave an answer that cannot be read"}
            silent = await there.get("output?member=0")
            assert silent == {"lines": [], "trouble": "has not answered within 1.0 s"}
            assert (await there.get("output", 400))["error"] == "name a member: ?member=ID"
            assert "has no member 7" in (await there.get("output?member=7", 404))["error"]

    run(main)


def test_the_page_gets_stacks_of_members_that_answer_and_a_reason_for_others() -> None:
    async def main() -> None:
        async with site() as there:
            await there.begin()
            text = 'Current thread 0x01 (most recent call first):\n  File "t.py", line 12 in step\n'
            asked = asyncio.create_task(there.get("stacks"))
            data = json.dumps({"stacks": [{"text": text, "trouble": ""}]}).encode()
            await there.answer(1, session_pb2.QUESTION_STACKS, data)
            silent, answered = (await asked)["processes"]
            assert answered == {
                "rank": 1, "member_id": there.members[1].member_id, "host": "host-a",
                "pid": answered["pid"], "trouble": "",
                "threads": [{"main": True, "library": False, "frames": ["t.py:12 in step"]}],
            }  # fmt: skip
            assert (silent["rank"], silent["threads"]) == (0, [])
            assert silent["trouble"] == (
                "has not answered within 1.0 s, nor does another member of its host: run paceline debug stacks digits "
                f"on host-a (pid {silent['pid']}), as the user of the job"
            )
            asked = asyncio.create_task(there.get("stacks?member=1"))
            await there.answer(1, session_pb2.QUESTION_STACKS, data)
            assert (await asked)["processes"] == [answered]

    run(main)


def test_the_page_gets_a_trace_of_members_that_answer() -> None:
    async def main() -> None:
        async with site() as there:
            recorder = FlightRecorder()
            recorder.know_group("", (0, 1))
            recorder.issue("", 1, b"all_reduce op=sum float32[8]", 1).begin()  # a trace begins with it
            await there.begin()
            described = {
                "job": "digits", "rank": 0, "size": 2, "generation": 1, "host": "host-a",
                "member_id": there.members[0].member_id,
            }  # fmt: skip
            asked = asyncio.create_task(there.http.get("/api/jobs/digits/trace", headers=OWN))
            await there.answer(
                0, session_pb2.QUESTION_RECORDS, record_answer(whole_record(recorder, described), time.time())
            )
            async with await asked as answer:
                assert answer.status == 200
                assert answer.headers["Content-Disposition"] == 'attachment; filename="digits.trace.json"'
                trace = await answer.json()
            check_trace(trace)
            kinds = {each["cat"] for each in trace["traceEvents"] if "cat" in each}
            assert {"all_reduce", "view"} <= kinds, "operations and events"
            (missing,) = trace["otherData"]["missing"]
            assert missing.startswith("rank 1: (host-a, pid ")
            assert missing.endswith(") has not answered within 1.0 s")
            refused = await there.get("trace?member=1", 404)
            assert refused["error"].startswith("no flight record is there; rank 1: ")

    run(main)


def test_a_name_cannot_leave_the_file_name_of_a_trace() -> None:
    async def main() -> None:
        async with site() as there:
            job = 'a"; filename="/etc/x'
            session = await RawSession.register(there.channel, job, least=1, most=1)
            await session.view()
            url = f"{there.coordinator.http_url}api/jobs/{job.replace('/', '%2F')}/trace"
            asked = asyncio.create_task(there.http.get(url, headers=OWN))
            there.members = [session]
            found = await session.next("asked")
            message = session_pb2.AnswerAskRequest(
                job=job, member_id=session.member_id, session_token=session.token, ask=found.ask,
                data=cut(record_answer(whole_record(None, {"job": job, "member_id": session.member_id}), 5.0)),
            )  # fmt: skip
            await session.stub.AnswerAsk(iter(in_messages(message)))
            async with await asked as answer:
                header = answer.headers["Content-Disposition"]
            assert header == 'attachment; filename="a___filename___etc_x.trace.json"'

    run(main)


@asynccontextmanager
async def limited(members: int, **limits: Any) -> AsyncIterator[Site]:
    """A site whose HTTP server has other limits, and whose job has so many members, two on each host."""
    coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0"))
    address = await coordinator.start()
    try:
        async with (
            web_server(coordinator, WebLimits(**limits)) as (_, url),
            aio.insecure_channel(address) as channel,
            aiohttp.ClientSession(url) as http,
        ):
            there = Site(coordinator, http, channel)
            for number in range(members):
                process = session_pb2.ProcessIdentity(
                    host=f"host-{number // 2}", pid=number + 1, boot_id=f"boot-{number // 2}", pid_namespace=1
                )
                session = await RawSession.register(
                    channel, "digits", least=members, most=members, failure_timeout=60.0, process=process
                )
                there.members.append(session)
            ranks = [(await session.view()).rank for session in there.members]
            there.members = [session for _, session in sorted(zip(ranks, there.members, strict=True))]
            yield there
    finally:
        await coordinator.stop(grace=0.2)


def some_record(there: Site, rank: int) -> bytes:
    described = {
        "job": "digits", "rank": rank, "size": len(there.members), "generation": 1, "host": "host-a",
        "member_id": there.members[rank].member_id,
    }  # fmt: skip
    recorder = FlightRecorder()
    recorder.issue("", 1, b"all_reduce op=sum float32[8]", 1).begin()
    return record_answer(whole_record(recorder, described), time.time())


def stacks_of(name: str, more: str = "") -> bytes:
    text = f'Current thread 0x01 (most recent call first):\n  File "t.py", line 12 in {name}\n{more}'
    return json.dumps({"stacks": [{"text": text, "trouble": ""}]}).encode()


def test_a_question_to_more_members_than_fit_into_memory_is_refused() -> None:
    async def main() -> None:
        async with limited(2, most_stacks=1) as there:
            refused = await there.get("stacks", 400)
            assert refused["error"].startswith("at most 1 members are asked over HTTP at a time, not 2: name one")

    run(main)


def test_a_trace_is_of_the_first_members_and_says_that_others_were_left_out() -> None:
    async def main() -> None:
        async with limited(3, most_traced=2) as there:
            asked = asyncio.create_task(there.http.get("/api/jobs/digits/trace", headers=OWN))
            for rank in (0, 1):
                await there.answer(rank, session_pb2.QUESTION_RECORDS, some_record(there, rank))
            async with await asked as answer:
                said, trace = answer.headers["X-Paceline-Left-Out"], await answer.json()
            assert said.startswith("1 of 3 members were not asked: ")
            assert said in trace["otherData"]["missing"]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await there.members[2].next("asked")

    run(main)


def test_members_that_hold_others_up_come_first_into_a_trace() -> None:
    detail = admin_pb2.GetJobResponse()
    for rank, standing in enumerate(("training", "training", "silent", "training")):
        detail.members.add(
            member=session_pb2.Member(member_id=f"m{rank}", rank=rank), in_view=True, attached=True, standing=standing
        )
    everyone = {each.member.member_id for each in detail.members}
    assert chosen_members(detail, everyone, 3) == ["m2", "m0", "m1"]
    assert chosen_members(detail, everyone - {"m2"}, 3) == ["m0", "m1", "m3"], "it has left"
    detail.members[3].attached = False
    assert chosen_members(detail, everyone, 2) == ["m2", "m3"]


def test_stacks_of_more_members_than_a_trace_has_share_the_room() -> None:
    async def main() -> None:
        async with limited(3, most_traced=1, stacks_bytes=3_000) as there:
            asked = asyncio.create_task(there.get("stacks"))
            for rank in range(3):
                more = "x" * 1_000 if rank == 1 else ""
                await there.answer(rank, session_pb2.QUESTION_STACKS, stacks_of(f"step{rank}", more))
            found = (await asked)["processes"]
            assert [each["rank"] for each in found] == [0, 1, 2]
            assert found[2]["threads"] == [{"main": True, "library": False, "frames": ["t.py:12 in step2"]}]
            assert "more than there is room for" in found[1]["trouble"]

    run(main)


def test_a_reading_that_takes_too_long_or_makes_too_much_is_refused_in_a_sentence() -> None:
    async def main() -> None:
        for limits, why in (({"read_s": 0.0}, "took more than 0 s to read"), ({"read_bytes": 10}, "are more than 0 ")):
            async with limited(1, **limits) as there:
                for path, question, data in (
                    ("trace", session_pb2.QUESTION_RECORDS, some_record(there, 0)),
                    ("stacks", session_pb2.QUESTION_STACKS, stacks_of("step")),
                ):
                    asked = asyncio.create_task(there.get(path, 503))
                    await there.answer(0, question, data)
                    refused = (await asked)["error"]
                    assert why in refused
                    assert refused.endswith(f"ask one member, or use paceline debug {path}")

    run(main)


def test_all_of_a_job_are_asked_one_question_at_a_time_and_one_member_meanwhile() -> None:
    async def main() -> None:
        async with limited(1, trace_s=0.5, stacks_s=5.0) as there:
            first = asyncio.create_task(there.get("stacks"))  # its member does not answer for a second
            await there.members[0].next("asked")
            refused = await there.get("trace", 503)
            assert refused["error"] == "the members' answers were not there within 0.5 s: ask again"
            assert (await there.get("output?member=0"))["trouble"].startswith("has not answered")
            assert "has not answered" in (await first)["processes"][0]["trouble"]

    run(main)


def test_neighbours_on_several_hosts_are_asked_at_the_same_time() -> None:
    async def main() -> None:
        async with limited(4) as there:
            asked = asyncio.create_task(there.get("stacks"))
            for rank in (0, 2):
                await there.answer(rank, session_pb2.QUESTION_STACKS, stacks_of("step"))
            helping = [await there.members[rank].next("asked") for rank in (0, 2)]  # neither has answered yet
            assert [list(each.pids) for each in helping] == [[2], [4]]
            for rank, question in zip((0, 2), helping, strict=True):
                await there.hand_in(rank, question, stacks_of(f"hangs{rank + 1}"))
            found = (await asked)["processes"]
            assert [each["threads"][0]["frames"] for each in found[1::2]] == [
                ["t.py:12 in hangs1"],
                ["t.py:12 in hangs3"],
            ]

    run(main)


async def _a_long_answer(*_: object) -> bytearray:
    return bytearray(b" ") * (32 << 20)  # more than the sockets hold


def test_the_size_of_answers_that_wait_to_be_sent_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "read", _a_long_answer)

    async def main() -> None:
        async with limited(1, sending_bytes=64 << 20) as there:
            budget = there.coordinator._dispatcher.vitals.memory["answers"]
            ask = b"GET /api/jobs/digits/stacks HTTP/1.1\r\nHost: localhost\r\nX-Paceline: page\r\n\r\n"
            url = there.http._base_url
            assert url is not None
            reader, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
            writer.write(ask)
            await there.answer(0, session_pb2.QUESTION_STACKS, stacks_of("step"))
            headers = await reader.readuntil(b"\r\n\r\n")
            assert b"\r\nContent-Length: 33554432\r\n" in headers
            asked = asyncio.create_task(there.get("stacks", 503))
            await there.answer(0, session_pb2.QUESTION_STACKS, stacks_of("step"))
            assert (await asked)["error"] == (
                "no room for an answer of 32 MiB: answers of 32 MiB wait for 127.0.0.1 to take them, and of 32 MiB for "
                "all, of 64 MiB at most. Nobody may have more than is left free: ask again when they are taken"
            )
            await reader.readexactly(32 << 20)
            writer.write(ask)
            await there.answer(0, session_pb2.QUESTION_STACKS, stacks_of("step"))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 "), "there is room again"
            assert budget.used == 32 << 20
            writer.close()

    run(main)


def test_an_answer_that_is_taken_too_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "read", _a_long_answer)

    async def main() -> None:
        async with limited(1, send_s=0.0) as there:
            asked = asyncio.create_task(there.http.get("/api/jobs/digits/stacks", headers=OWN))
            await there.answer(0, session_pb2.QUESTION_STACKS, stacks_of("step"))
            with pytest.raises(aiohttp.ClientError):
                async with await asked as answer:
                    await answer.read()
            assert there.coordinator._dispatcher.vitals.memory["answers"].used == 0

    run(main)


def test_an_answer_that_is_never_sent_takes_no_room() -> None:
    sending = Sending(WebLimits(sending_bytes=8))
    request: Any = SimpleNamespace(method="GET")
    for _ in range(2):
        answer = sending.answer(request, "somebody", b"[12]")
        assert sending.budget.used == 4
        del answer
    assert sending.budget.used == 0


def test_the_limits_of_questions_hold_over_http() -> None:
    async def main() -> None:
        async with site() as there:
            await there.begin()
            admin: Any = AdminServiceStub(there.channel)
            request = admin_pb2.AskMembersRequest(job="digits", what=session_pb2.QUESTION_RECORDS, members=["0"])
            request.patience.FromSeconds(50)
            calls = [admin.AskMembers(request) for _ in range(4)]
            for _ in calls:
                await there.members[0].next("asked")
            assert "ask again" in (await there.get("output?member=1", 503))["error"]
            for call in calls:
                call.cancel()

    run(main)


def test_a_question_over_http_has_a_line_in_the_audit_log(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with site(token_file=tokens) as there:
            await there.begin(WORKS)
            await there.get("output?member=1", token=ALL)
            await there.get("stacks", 403, token=READS)

    caplog.set_level(logging.INFO, "paceline.audit")
    run(main)
    done, refused = [json.loads(each.getMessage()) for each in caplog.records if each.name == "paceline.audit"]
    assert {"audit": "AskMembers", "outcome": "done", "question": "output", "members": ["1"]}.items() <= done.items()
    assert (done["token"], done["job"]) == ("line 1", "digits")
    assert (refused["outcome"], refused["question"], refused["token"]) == ("refused", "stacks", "line 2")


def test_only_operators_see_what_ended_workers_have_printed(tokens: Path) -> None:
    async def main() -> None:
        async with site(token_file=tokens) as there:
            await there.begin(WORKS)
            process = session_pb2.ProcessIdentity(host="host-a", pid=2)
            bearer = {who: aio.Metadata(("authorization", f"Bearer {who}")) for who in (ALL, READS, WORKS)}
            report = session_pb2.ReportExitRequest(
                job="digits", process=process, exit_code=-9, output="a\nsecret\x1b[2J"
            )
            await there.members[0].stub.ReportExit(report, metadata=bearer[WORKS])
            admin: Any = AdminServiceStub(there.channel)
            for token, seen in ((ALL, "a\nsecret[2J"), (READS, ""), (WORKS, ""), (ALL, "a\nsecret[2J")):
                (gone,) = (await there.get("", token=token))["gone"]
                assert (gone["pid"], gone["output"]) == (2, seen)
                answer = await admin.GetJob(admin_pb2.GetJobRequest(job="digits"), metadata=bearer[token])
                assert [each.output for each in answer.gone] == [seen]
                headers = {"Authorization": f"Bearer {token}"}
                async with (
                    there.http.get("/api/stream?job=digits", headers=headers) as stream,
                    asyncio.timeout(PATIENCE),
                ):
                    _, data = (await stream.content.readuntil(b"\n\n")).decode().strip().split("\n")
                    assert json.loads(data.removeprefix("data: "))["gone"][0]["output"] == seen

    run(main)


def test_what_a_reader_may_not_see_stays_in_the_answer_of_others() -> None:
    answer = admin_pb2.GetJobResponse()
    answer.gone.add(output="a line", how="was killed")
    seen = seen_by(Role.READ, answer)
    assert (seen.gone[0].output, seen.gone[0].how) == ("", "was killed")
    assert seen_by(Role.OPERATOR, answer).gone[0].output == "a line"


def test_a_stream_ends_when_its_token_gets_another_role(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_server.web.stream._CHECK_S", 0.0)

    async def main() -> None:
        async with site(token_file=tokens) as there:
            await there.begin(WORKS)
            headers = {"Authorization": f"Bearer {ALL}"}
            async with there.http.get("/api/stream?job=digits", headers=headers) as stream, asyncio.timeout(PATIENCE):
                await stream.content.readuntil(b"\n\n")
                tokens.write_text(f"{ALL} role=read\n{WORKS} role=worker digits\n")  # noqa: ASYNC240  a few bytes
                await stream.content.read()  # to its end

    run(main)


def test_a_stopping_coordinator_sends_a_complete_last_message() -> None:
    async def main() -> None:
        async with site() as there:
            await there.begin()
            async with (
                there.http.get("/api/stream?job=digits") as job,
                there.http.get("/api/stream") as jobs,
                asyncio.timeout(PATIENCE),
            ):
                for stream in (job, jobs):
                    await stream.content.readuntil(b"\n\n")
                there.coordinator._dispatcher.drain()  # no message of a round comes after the change
                there.coordinator._dispatcher.jobs["digits"].membership.state.finished = 7
                await there.coordinator.stop(grace=0.2)
                for stream, phase in ((job, lambda said: said["job"]), (jobs, lambda said: said["jobs"][0])):
                    *_, last = (await stream.content.read()).decode().strip().split("\n\n")
                    said = json.loads(last.partition("\ndata: ")[2])
                    assert phase(said)["phase"] == "finished"
                    assert "members_changed" not in said

    run(main)
