"""An operator sees metrics that move when their cause happens, and a line for each action."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from integration.process_coordinator import server_process
from paceline_server._grpc import aio, grpc
from paceline_server.services.audit import Audit, Caller
from pacelinepb.pieces import in_messages
from pacelinepb.v1 import admin_pb2, session_pb2, store_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.certificates import CertificateFolder, make_folder
from support.coordinator import RawSession, reason_of, run
from support.python_process import Process

OPERATOR, WORKER, OTHER = "the-token-of-operators-0", "the-token-of-a-worker-00", "the-token-of-another-job"
TOKENS = f"# Those of this test.\n{OPERATOR}\n{WORKER} role=worker digits\n{OTHER} other\n"


class Operated:
    """A coordinator's process with HTTP, and those who call it.

    Args:
        process: has started.
        channel, http: lead to it.
        token: of an operator, for HTTP.

    Attributes:
        log: what it has written so far.
    """

    def __init__(self, process: Process, channel: aio.Channel, http: aiohttp.ClientSession, token: str) -> None:
        self.pid = process.pid
        self.http_port = http._base_url.port  # type: ignore[union-attr]
        self.channel = channel
        self.http = http
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.log = ""
        self._process = process

    async def metrics(self) -> dict[str, float]:
        """Values by the name of the series."""
        async with self.http.get("/metrics", headers=self.headers) as answer:
            assert answer.status == 200
            lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    async def refusals(self) -> dict[str, float]:
        """How many were refused, by reason."""
        found = {
            re.fullmatch(r'paceline_refusals_total{reason="(\w+)"}', n): v for n, v in (await self.metrics()).items()
        }
        return {name[1]: value for name, value in found.items() if name is not None}

    def drain(self, job: str, *members: str, token: str = "") -> Any:
        """The call."""
        metadata = aio.Metadata(("authorization", f"Bearer {token}")) if token else None
        admin: Any = AdminServiceStub(self.channel)
        return admin.DrainMembers(admin_pb2.DrainMembersRequest(job=job, members=members), metadata=metadata)

    async def audited(self, count: int) -> list[dict[str, Any]]:
        """The lines of the audit so far, once there are so many."""
        assert self._process.stderr is not None
        while len(found := re.findall(r"^\S+ \S+ INFO paceline\.audit: (.*)$", self.log, re.MULTILINE)) < count:
            line = await asyncio.to_thread(self._process.stderr.readline)
            assert line, self.log
            self.log += line
        return [json.loads(line) for line in found]


@asynccontextmanager
async def operated(
    *arguments: str, token: str = "", folder: CertificateFolder | None = None
) -> AsyncIterator[Operated]:
    with server_process("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *arguments) as process:
        assert process.stdout is not None
        address, url = [(await asyncio.to_thread(process.stdout.readline)).split()[-1] for _ in range(2)]
        channel, trusting = aio.insecure_channel(address), None
        if folder is not None:
            files = [(folder.path / name).read_bytes() for name in ("ca.pem", "member.key", "member.pem")]
            channel = aio.secure_channel(address, grpc.ssl_channel_credentials(*files))
            trusting = ssl.create_default_context(cafile=folder.path / "ca.pem")
            trusting.load_cert_chain(folder.path / "member.pem", folder.path / "member.key")
        connector = aiohttp.TCPConnector(ssl=trusting or True)
        async with channel, aiohttp.ClientSession(url, connector=connector) as http:
            yield Operated(process, channel, http, token)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(TOKENS)
    return file


async def refusal(call: Any) -> str:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return reason_of(caught.value)


# Metrics --------------------------------------------------------------------------------------------------------------


def test_metrics_show_the_places_and_memory_held_by_callers() -> None:
    async def main() -> None:
        async with operated() as it:
            before = await it.metrics()
            session = await RawSession.register(it.channel, least=1, most=1)
            await session.view()
            request = store_pb2.SetRequest(caller=session.caller, key="key", value=[b"x" * 1000], call=1)
            await StoreServiceStub(it.channel).Set(iter(in_messages(request)))
            async with it.http.get("/api/stream"):
                held = await it.metrics()
            for kind, more in (("sessions", 1), ("jobs", 1), ("streams", 1)):
                name = f'paceline_places_used{{kind="{kind}"}}'
                assert held[name] - before[name] == more, kind
            assert held['paceline_places_used{kind="connections"}'] >= 1
            for kind, least in (("calls", 40_000), ("store", 1000)):
                assert held[f'paceline_budget_used_bytes{{kind="{kind}"}}'] >= least
            assert held['paceline_places{kind="sessions"}'] == 12_000
            assert held['paceline_budget_bytes{kind="calls"}'] == 2 * held['paceline_budget_bytes{kind="store"}']
            await session.leave()
            for kind in ("sessions", "streams"):
                while (await it.metrics())[f'paceline_places_used{{kind="{kind}"}}']:
                    pass

    run(main)


def test_refusals_are_counted_by_reason_over_grpc_and_http(tokens: Path) -> None:
    async def main() -> None:
        async with operated("--token-file", str(tokens), token=OPERATOR) as it:
            assert {key: value for key, value in (await it.refusals()).items() if value} == {}
            admin: Any = AdminServiceStub(it.channel)
            assert await refusal(admin.ListJobs(admin_pb2.ListJobsRequest())) == "UNAUTHENTICATED"
            assert await refusal(it.drain("digits", token=WORKER)) == "PERMISSION_DENIED"
            assert await refusal(it.drain("digits", token=OPERATOR)) == "NOT_FOUND"
            for path, status in (("/api/jobs", 401), ("/readyz", 200), ("/api/jobs/none", 404)):
                headers = {} if status == 401 else it.headers
                async with it.http.get(path, headers=headers) as answer:
                    assert answer.status == status
            counted = {key: value for key, value in (await it.refusals()).items() if value}
            assert counted == {"unauthenticated": 2, "permission_denied": 1, "not_found": 2}

    run(main)


def test_a_stall_of_the_event_loop_is_measured() -> None:
    async def main() -> None:
        async with operated() as it:
            os.kill(it.pid, signal.SIGSTOP)
            await asyncio.sleep(0.6)  # the stall itself
            os.kill(it.pid, signal.SIGCONT)
            while (found := await it.metrics())["paceline_loop_longest_stall_seconds"] < 0.5:
                pass
            long = found["paceline_loop_stall_seconds_count"] - found['paceline_loop_stall_seconds_bucket{le="0.5"}']
            assert long == 1
            assert found["paceline_loop_stall_seconds_sum"] >= found["paceline_loop_longest_stall_seconds"]

    run(main)


def test_metrics_show_descriptors_memory_and_their_limits() -> None:
    async def main() -> None:
        async with operated() as it:
            before = await it.metrics()
            writers = [(await asyncio.open_connection("127.0.0.1", it.http_port))[1] for _ in range(20)]
            while (held := await it.metrics())["process_open_fds"] < before["process_open_fds"] + 20:
                pass
            for writer in writers:
                writer.close()
            assert held["process_max_fds"] == resource.prlimit(it.pid, resource.RLIMIT_NOFILE)[0]
            assert 20e6 < held["process_resident_memory_bytes"] < held["paceline_memory_limit_bytes"]

    run(main)


# The audit ------------------------------------------------------------------------------------------------------------


def test_each_operator_action_writes_one_audit_line(tokens: Path) -> None:
    async def main() -> None:
        async with operated("--token-file", str(tokens), token=OPERATOR) as it:
            session = await RawSession.register(it.channel, "digits", least=1, most=1, token=OPERATOR)
            await session.view()
            asked = admin_pb2.AskMembersRequest(job="digits", what=session_pb2.QUESTION_STACKS, members=["0"])
            asked.patience.FromMilliseconds(1)
            metadata = aio.Metadata(("authorization", f"Bearer {OPERATOR}"))
            admin: Any = AdminServiceStub(it.channel)
            async for _ in admin.AskMembers(asked, metadata=metadata):
                pass
            await it.drain("digits", "0", token=OPERATOR)
            assert await refusal(it.drain("digits", "7", token=OPERATOR)) == "NOT_FOUND"
            forget = admin_pb2.ForgetJobRequest(job="digits")
            assert await refusal(admin.ForgetJob(forget, metadata=metadata)) == "BAD_REQUEST"
            async with it.http.post("/api/jobs/digits/drain", json={"members": []}, headers=it.headers) as answer:
                assert answer.status == 200
            await admin.RestartJob(admin_pb2.RestartJobRequest(job="digits"), metadata=metadata)
            await admin.ListJobs(admin_pb2.ListJobsRequest(), metadata=metadata)  # changes nothing
            lines = await it.audited(6)
            operator = {"token": "line 2", "role": "operator", "job": "digits"}
            for line in lines:
                assert re.fullmatch(r"127\.0\.0\.1:\d+", line.pop("from"))
                assert line.items() >= operator.items()
            assert [{k: v for k, v in line.items() if k not in operator} for line in lines] == [
                {"audit": "AskMembers", "outcome": "done", "question": "stacks", "members": ["0"]},
                {"audit": "DrainMembers", "outcome": "done", "members": ["0"]},
                {"audit": "DrainMembers", "outcome": "refused", "reason": "NOT_FOUND", "members": ["7"]},
                {"audit": "ForgetJob", "outcome": "refused", "reason": "BAD_REQUEST"},
                {"audit": "DrainMembers", "outcome": "done"},
                {"audit": "RestartJob", "outcome": "done"},
            ]
            assert OPERATOR not in it.log

    run(main)


def test_refused_callers_write_one_audit_line_a_minute(tokens: Path) -> None:
    async def main() -> None:
        async with operated("--token-file", str(tokens), token=OPERATOR) as it:
            for _ in range(5):
                for token in (WORKER, OTHER, "x" * 20, ""):
                    assert await refusal(it.drain("digits", token=token)) in ("PERMISSION_DENIED", "UNAUTHENTICATED")
                async with it.http.post("/api/jobs/digits/drain", json={"members": []}) as answer:
                    assert answer.status == 401
            await refusal(it.drain("nothing", token=OPERATOR))
            lines = await it.audited(6)
            assert [(line.get("token"), line.get("role"), line["reason"], line.get("times")) for line in lines] == [
                ("line 3", "worker", "PERMISSION_DENIED", 1),
                ("line 4", "operator", "PERMISSION_DENIED", 1),
                ("unknown", None, "UNAUTHENTICATED", 1),
                ("none", None, "UNAUTHENTICATED", 1),
                ("none", None, "UNAUTHENTICATED", 1),
                ("line 2", "operator", "NOT_FOUND", None),
            ]

    run(main)


def test_a_name_cannot_forge_an_audit_line() -> None:
    forged = 'x\n12:00:00 {"audit": "ForgetJob", "outcome": "done"}\r\x1b[2K\u2028'

    async def main() -> None:
        async with operated() as it:
            assert await refusal(it.drain(forged, forged[:50])) == "NOT_FOUND"
            assert await refusal(it.drain("digits", *["7"] * 100)) == "NOT_FOUND"
            first, second = await it.audited(2)
            assert (first["job"], first["members"]) == (forged, [forged[:50]])
            assert (len(second["members"]), second["members_named"]) == (20, 100)
            assert it.log.count("ForgetJob") == it.log.count('\\"ForgetJob\\"') == 2
            async with it.http.post(f"/api/jobs/{'y' * 1000}/drain", json={"members": ["z" * 1000]}) as answer:
                assert answer.status == 404
            third = (await it.audited(3))[2]
            assert set(re.findall(r"[^ -~]", it.log)) == {"\n"}
            assert (third["job"], third["members"]) == ("y" * 128 + "...", ["z" * 128 + "..."])

    run(main)


def test_an_audit_line_names_the_callers_certificate(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tls")

    async def main() -> None:
        async with operated(*folder.arguments, folder=folder) as it:
            assert await refusal(it.drain("digits")) == "NOT_FOUND"
            async with it.http.post("/api/jobs/digits/drain", json={"members": []}) as answer:
                assert answer.status == 404
            lines = await it.audited(2)
            assert [line.pop("from").rpartition(":")[0] for line in lines] == ["127.0.0.1", "127.0.0.1"]
            wanted = {"audit": "DrainMembers", "outcome": "refused", "reason": "NOT_FOUND", "job": "digits"}
            assert lines == [wanted | {"certificate": "member"}] * 2

    run(main)


@pytest.mark.parametrize(
    ("error", "outcome"), [(asyncio.CancelledError(), "cancelled"), (OSError("the disk is full"), "failed")]
)
def test_a_failed_or_cancelled_call_writes_an_audit_line(
    error: BaseException, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    def forget() -> None:
        with Audit(None).of("ForgetJob", Caller("10.0.0.5:4711", None)) as action:
            action.job = "digits"
            raise error

    with caplog.at_level(logging.INFO, "paceline.audit"), pytest.raises(type(error)):
        forget()
    wanted = {"audit": "ForgetJob", "outcome": outcome, "job": "digits", "from": "10.0.0.5:4711"}
    assert [json.loads(record.getMessage()) for record in caplog.records] == [wanted]
