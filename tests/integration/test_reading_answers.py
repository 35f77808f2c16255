"""The process that reads members' answers for the page: whatever they have sent, it ends, and takes little."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from paceline._base.activity import FlightRecorder
from paceline._session.answers import whole_record
from paceline_server.errors import NoRoom, NotFound
from paceline_server.web import reading
from paceline_server.web.web_limits import WebLimits
from pacelinepb.debug.apart import stacks_request, trace_request
from pacelinepb.debug.gathered import Answered
from pacelinepb.v1.admin_pb2 import GetJobResponse, ListEventsResponse
from pacelinepb.v1.session_pb2 import Member, ProcessIdentity
from support.chrome_format import check_trace
from support.coordinator import run

FOREVER = "import time; time.sleep(600)"
TOO_MUCH = reading._CODE.replace(
    "; main()", "; import pacelinepb.debug.apart as it; it._answer = lambda *_: bytes(1 << 31); main()"
)
ENDS = "raise SystemExit(7)"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """All processes that a test has started."""
    found: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def noted(*arguments: Any, **more: Any) -> asyncio.subprocess.Process:
        found.append(await start(*arguments, **more))
        return found[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    return found


def answer(data: bytes) -> Answered:
    member = Member(member_id="m", rank=0, process=ProcessIdentity(host="host-a", pid=1))
    return Answered(member, True, data, "", 1.0, 2.0)


def a_trace(*answers: Answered) -> Iterable[bytes]:
    return trace_request(answers, GetJobResponse(), ListEventsResponse(), ["others were not asked"])


def overlapping(count: int) -> bytes:
    """A record whose operations all lie in one another, which a member's own answer would have cut to 1 MiB."""
    recorder = FlightRecorder(capacity=count)
    for number in range(1, count + 1):
        recorder.issue("", number, b"all_reduce op=sum float32[8]", 1).begin()
    described = {"job": "digits", "rank": 0, "size": 1, "generation": 1, "host": "host-a", "member_id": "m"}
    return json.dumps(whole_record(recorder, described)).encode()


def test_of_a_record_with_5000_overlapping_operations_a_recorders_worth_is_drawn() -> None:
    async def main() -> None:
        trace = json.loads(await reading.Reader("it", WebLimits()).read(a_trace(answer(overlapping(5_000)))))
        check_trace(trace)
        slices = [each for each in trace["traceEvents"] if each["ph"] == "X" and each["cat"] == "all_reduce"]
        assert len(slices) == 1_000
        assert len(trace["traceEvents"]) < 7_000, "two names for each lane, and a slice for waiting"
        assert trace["otherData"]["missing"] == ["others were not asked"]

    run(main)


def test_an_environment_with_secrets_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "a-secret")
    monkeypatch.setattr(reading, "_CODE", "import json, os; print(json.dumps(sorted(os.environ)))")

    async def main() -> None:
        names = json.loads(await reading.Reader("it", WebLimits()).read([]))
        assert not [name for name in names if name.startswith(("PACELINE", "PYTHON"))]

    run(main)


@pytest.mark.parametrize(
    ("code", "limits", "why"),
    [
        (FOREVER, {"read_s": 0.1}, "took more than 0.1 s to read"),
        (TOO_MUCH, {}, "took too much memory to read"),
        (ENDS, {}, "could not be read: the process that reads them has ended with 7"),
        ("print('x' * (3 << 20))", {"read_bytes": 1 << 20}, "are more than 1 MiB"),
    ],
)
def test_a_process_that_fails_ends_and_the_next_question_has_an_answer(
    code: str,
    limits: dict[str, Any],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    started: list[asyncio.subprocess.Process],
) -> None:
    async def main() -> None:
        reader = reading.Reader("paceline debug trace", WebLimits(**limits))
        with monkeypatch.context() as patched:
            patched.setattr(reading, "_CODE", code)
            with pytest.raises(NoRoom) as refused:
                await reader.read(a_trace(answer(overlapping(1_000))))
        assert str(refused.value) == f"the answers of the members {why}; ask one member, or use paceline debug trace"
        assert all(each.returncode is not None for each in started)
        usual = reading.Reader("it", WebLimits())
        assert json.loads(await usual.read(stacks_request([answer(b"?")], "digits", [])))["processes"][0]["trouble"]

    run(main)


def test_a_caller_that_stops_waiting_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, started: list[asyncio.subprocess.Process]
) -> None:
    monkeypatch.setattr(reading, "_CODE", FOREVER)

    async def main() -> None:
        reader = reading.Reader("it", WebLimits())
        first = asyncio.create_task(reader.read([]))
        while not started:  # noqa: ASYNC110  what is patched here has no event
            await asyncio.sleep(0)
        second = asyncio.create_task(reader.read([]))
        await asyncio.sleep(0)
        assert len(started) == 1, "one at a time"
        for each in (second, first):
            each.cancel()
            with pytest.raises(asyncio.CancelledError):
                await each
        assert [each.returncode for each in started] == [-9]

    run(main)


def test_members_that_answer_with_nothing_are_not_found() -> None:
    async def main() -> None:
        with pytest.raises(NotFound, match=r"^no flight record is there; rank 0: .* cannot be read"):
            await reading.Reader("it", WebLimits()).read(a_trace(answer(b"[" * 100_000)))

    run(main)
