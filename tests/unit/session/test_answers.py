"""What a member answers to an operator, and that nothing of it can end training."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from typing import Any, cast

import pytest

from paceline._base.activity import FlightRecorder
from paceline._base.proofs import DoorKey
from paceline._session import answers
from paceline._session.answers import (
    MAX_ANSWER_BYTES,
    answer_question,
    output_answer,
    record_answer,
    stacks_answer,
    whole_record,
)
from paceline._session.control import ControlStream
from paceline._session.output_file import OUTPUT_FD, OutputFile
from pacelinepb import MOST_PIDS
from pacelinepb.debug.records import read_record
from pacelinepb.v1 import session_pb2 as pb

LONGEST = b"all_reduce op=sum float64[" + b",".join([b"1"] * 32) + b"]"


def test_read_record_parses_a_record_answer() -> None:
    recorder = FlightRecorder()
    recorder.know_group("", (0, 1, 2))
    recorder.step(4, 7)
    recorder.issue("split1", 3, b"all_reduce op=sum float32[8]", 4, 1).begin()
    described = {
        "job": "digits",
        "rank": 1,
        "size": 3,
        "generation": 4,
        "host": "h",
        "member_id": "m",
        "links": ["shm"],
    }
    found = read_record(record_answer(whole_record(recorder, described), 5.0))
    assert (found.job, found.rank, found.size, found.generation, found.host) == ("digits", 1, 3, 4, "h")
    assert (found.pid, found.member_id, found.links, found.read_at) == (os.getpid(), "m", ("shm",), 5.0)
    assert found.groups == {"": (0, 1, 2)}
    assert [(step.generation, step.number) for step in found.steps] == [(4, 7)]
    (operation,) = found.operations
    assert (operation.group, operation.number, operation.state) == (("split1", 1), 3, "running")
    assert found.sent_at is not None
    assert found.sent_at >= found.at


def test_an_oversized_record_drops_its_oldest_operations() -> None:
    recorder = FlightRecorder()
    for number in range(1, 1001):
        recorder.issue("g" * 250, number, LONGEST, 1).end(ValueError("x" * 1000))
    answer = record_answer(whole_record(recorder, {}), 0.0)
    found = read_record(answer)
    assert MAX_ANSWER_BYTES - 5000 < len(answer) <= MAX_ANSWER_BYTES
    assert found.left_out == 1000 - len(found.operations) > 0
    assert [each.number for each in found.operations] == list(range(found.left_out + 1, 1001))


def test_of_a_record_with_more_than_a_recorder_has_the_newest_is_kept() -> None:
    recorder = FlightRecorder(capacity=5_000)
    for number in range(1, 3_001):
        recorder.issue("", number, b"barrier", 1)
    record = whole_record(recorder, {"links": ["x" * 5_000]})
    step = {"generation": 1, "at": record["time"]}
    found = read_record(json.dumps(record | {"steps": [step | {"number": number} for number in range(300)]}).encode())
    assert [each.number for each in found.operations] == list(range(2_001, 3_001))
    assert [each.number for each in found.steps] == list(range(44, 300))
    assert found.left_out == 2_000
    assert found.links == ("x" * 40,), "each operation's slice has it"


def test_a_worker_outside_any_view_answers_with_an_empty_record() -> None:
    found = read_record(record_answer(whole_record(None, {"job": "digits", "member_id": "m"}), 0.0))
    assert (found.rank, found.generation, found.operations) == (None, 0, ())


def test_stacks_of_the_member_itself() -> None:
    found = json.loads(asyncio.run(stacks_answer((), 1.0, DoorKey())))
    (own,) = found["stacks"]
    assert own["pid"] == os.getpid()
    assert "test_stacks_of_the_member_itself" in own["text"]


def test_stacks_of_a_dead_process_give_a_reason() -> None:
    found = json.loads(asyncio.run(stacks_answer((1 << 30,), 1.0, DoorKey())))
    assert found["stacks"] == [{"pid": 1 << 30, "text": "", "trouble": "the process has ended"}]


def test_hanging_processes_are_signaled_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one after another, or as many at a time as asyncio has threads, they take longer than is waited for."""
    all_signalled = threading.Barrier(MOST_PIDS)

    def hanging(pid: int, _: DoorKey) -> str:
        all_signalled.wait(10.0)
        raise OSError(errno.ETIMEDOUT, f"{pid} hangs")

    monkeypatch.setattr(answers, "stacks_by_signal", hanging)
    pids = tuple(range((1 << 30) + 1, (1 << 30) + 1 + MOST_PIDS))
    found = json.loads(asyncio.run(stacks_answer(pids, 1.0, DoorKey())))
    assert [each["trouble"] for each in found["stacks"]] == [f"{pid} hangs" for pid in pids]


def test_the_last_lines_of_the_member_itself() -> None:
    kept = OutputFile()
    kept.write(b"one\n\x1b[31mtwo \xff")
    found = json.loads(output_answer({OUTPUT_FD: str(kept.fd)}, 5.0))
    kept.close()
    assert (found["lines"], found["trouble"]) == (["one", "two \N{REPLACEMENT CHARACTER}"], "")
    assert found["read_at"] == 5.0 < found["sent_at"]


def test_a_member_without_a_launcher_says_that_its_output_is_not_kept() -> None:
    found = json.loads(output_answer({}, 5.0))
    assert found["trouble"] == "its output is not kept: it was not started by paceline run"
    assert found["lines"] == []


def test_a_failure_to_answer_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    """Planted: an exception of this task would end the member (`MemberConnection._ended`)."""

    def broken() -> dict[str, Any]:
        raise ZeroDivisionError("a bug")

    asked = pb.Asked(ask=1, what=pb.QUESTION_RECORDS)
    asyncio.run(answer_question(asked, cast(ControlStream, None), "digits", broken, DoorKey()))
    (record,) = caplog.records
    assert record.getMessage() == "job 'digits': a question of an operator could not be answered"


def test_an_unknown_question_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(answer_question(pb.Asked(ask=1, what=77), cast(ControlStream, None), "digits", dict, DoorKey()))  # type: ignore[arg-type]
    assert not caplog.records
