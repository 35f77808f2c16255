"""The flight recorder: what is remembered, what is forgotten, and that looking never disturbs who records."""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref
from types import FrameType
from typing import Any

import numpy as np
import pytest

from paceline._base.activity import FlightRecorder, error_text
from paceline._base.arrays import Signature
from paceline.errors import PeerLost

SUM = b"all_reduce op=sum float32[1024,3]"


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> FlightRecorder:
    return FlightRecorder(4, clock, lambda: clock.now + 1_700_000_000.0 - 100.0)


def test_snapshot_of_a_finished_operation(recorder: FlightRecorder, clock: Clock) -> None:
    entry = recorder.issue("model", 7, SUM)
    clock.now += 0.25
    entry.begin()
    clock.now += 1.5
    entry.end()
    clock.now += 60.0
    assert recorder.snapshot() == [
        {
            "number": 7,
            "group": "model",
            "first_rank": 0,
            "generation": 0,
            "operation": "all_reduce",
            "detail": "op=sum",
            "dtype": "float32",
            "shape": [1024, 3],
            "bytes": 1024 * 3 * 4,
            "state": "done",
            "issued_at": "2023-11-14T22:13:20.000000+00:00",
            "began_at": "2023-11-14T22:13:20.250000+00:00",
            "ended_at": "2023-11-14T22:13:21.750000+00:00",
            "waited_s": 0.25,
            "took_s": 1.5,
            "error": None,
        }
    ]


def test_times_of_unfinished_operations_run_until_now(recorder: FlightRecorder, clock: Clock) -> None:
    recorder.issue("", 1, SUM).begin()
    clock.now += 1.0
    recorder.issue("", 2, SUM)
    clock.now += 2.0
    running, issued = recorder.snapshot()
    assert (running["state"], running["waited_s"], running["took_s"]) == ("running", 0.0, 3.0)
    assert (issued["state"], issued["waited_s"], issued["took_s"]) == ("issued", 2.0, None)
    assert running["ended_at"] is issued["began_at"] is issued["ended_at"] is None


def test_a_failed_operation_keeps_the_type_and_text_of_its_error(recorder: FlightRecorder, clock: Clock) -> None:
    entry = recorder.issue("", 1, b"barrier")
    entry.begin()
    entry.end(PeerLost("rank 2 on node-b was lost"))
    (found,) = recorder.snapshot()
    assert (found["state"], found["error"]) == ("failed", "PeerLost: rank 2 on node-b was lost")
    entry.end()  # too late: how it ended is known
    assert recorder.snapshot() == [found]


def test_an_operation_that_fails_before_it_begins_has_no_begin_time(recorder: FlightRecorder, clock: Clock) -> None:
    entry = recorder.issue("", 1, b"barrier")
    clock.now += 3.0
    entry.end(TimeoutError())
    (found,) = recorder.snapshot()
    assert (found["state"], found["error"], found["waited_s"]) == ("failed", "TimeoutError", 3.0)
    assert found["began_at"] is found["took_s"] is None


def test_a_recorded_error_keeps_no_array_alive(recorder: FlightRecorder) -> None:
    class Held(np.ndarray[Any, Any]):
        pass

    def fail() -> weakref.ref[Held]:
        array = np.zeros(3).view(Held)
        try:
            raise ValueError("no")
        except ValueError as error:
            recorder.issue("", 1, SUM).end(error)
        return weakref.ref(array)

    reference = fail()
    gc.collect()
    assert reference() is None


def test_a_long_or_broken_error_text_is_cut_or_left_out() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert len(error_text(ValueError("x" * 100_000))) == 1000
    assert error_text(Broken()) == "Broken"


def test_the_oldest_operations_are_dropped_at_capacity(recorder: FlightRecorder) -> None:
    for number in range(1, 11):
        recorder.issue("", number, SUM)
    assert [entry["number"] for entry in recorder.snapshot()] == [7, 8, 9, 10]
    assert recorder.find(0, "", 6) is None
    assert recorder.find(0, "", 7) == SUM


def test_find_distinguishes_groups_and_generations(recorder: FlightRecorder) -> None:
    recorder.issue("", 1, b"barrier")
    recorder.issue("model", 1, SUM)
    assert tuple(recorder.find(0, name, 1) for name in ("", "model", "data")) == (b"barrier", SUM, None)
    recorder.issue("", 1, b"broadcast root=0", 2)  # the next generation counts from 1 again
    assert (recorder.find(0, "", 1), recorder.find(2, "", 1)) == (b"barrier", b"broadcast root=0")


def test_a_capacity_of_zero_raises_value_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        FlightRecorder(0)


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        (b"barrier", ("barrier", "", None, None, None)),
        (b"broadcast root=0", ("broadcast", "root=0", None, None, None)),
        (b"broadcast root=1 int8[]", ("broadcast", "root=1", "int8", [], 1)),
        (Signature("all_reduce", "op=max", np.dtype("float64"), (0, 5)).encode(),
         ("all_reduce", "op=max", "float64", [0, 5], 0)),
        (b"all_reduce op=sum bfloat16[8]", ("all_reduce", "op=sum", "bfloat16", [8], 16)),
        (b"\xffnonsense[", ("\\xffnonsense[", "", None, None, None)),
    ],
)  # fmt: skip
def test_snapshot_splits_signatures_into_fields(
    recorder: FlightRecorder, signature: bytes, expected: tuple[object, ...]
) -> None:
    recorder.issue("", 1, signature)
    (found,) = json.loads(json.dumps(recorder.snapshot()))
    assert tuple(found[key] for key in ("operation", "detail", "dtype", "shape", "bytes")) == expected


def test_a_snapshot_may_interrupt_recording_at_any_instruction(recorder: FlightRecorder) -> None:
    """As a signal handler does: between any two instructions of the thread that records."""
    seen: list[list[str]] = []
    recording = {"issue", "__init__", "begin", "end"}

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_globals.get("__name__") != "paceline._base.activity" or frame.f_code.co_name not in recording:
            return None
        frame.f_trace_opcodes = True
        seen.append([entry["state"] for entry in recorder.snapshot()])
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for number in range(1, 7):
            entry = recorder.issue("", number, SUM)
            entry.begin()
            entry.end()
    finally:
        sys.settrace(before)
    assert {state for states in seen for state in states} == {"issued", "running", "done"}
    assert all(len(states) <= 4 and states[:-1] == ["done"] * len(states[:-1]) for states in seen)


def test_threads_can_record_while_another_takes_snapshots() -> None:
    recorder, each, threads = FlightRecorder(50), 2000, 3
    over = threading.Event()
    errors: list[BaseException] = []

    def record(group: str) -> None:
        for number in range(1, each + 1):
            entry = recorder.issue(group, number, b"barrier")
            entry.begin()
            entry.end()

    def look() -> None:
        try:
            while not over.is_set():
                for found in recorder.snapshot():
                    assert found["waited_s"] >= 0
                    assert found["took_s"] is None or found["took_s"] >= 0
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    looking = threading.Thread(target=look)
    looking.start()
    recording = [threading.Thread(target=record, args=(str(index),)) for index in range(threads)]
    for thread in recording:
        thread.start()
    for thread in recording:
        thread.join()
    over.set()
    looking.join()
    assert errors == []
    assert len(recorder.snapshot()) == 50
    for index in range(threads):
        own = [entry["number"] for entry in recorder.snapshot() if entry["group"] == str(index)]
        assert own == sorted(own)


def test_only_the_latest_steps_and_groups_are_kept(clock: Clock) -> None:
    recorder = FlightRecorder(4, clock, lambda: clock.now + 1_700_000_000.0 - 100.0)
    recorder.know_group("", (0, 1))
    for number in range(300):
        recorder.step(2, number)
        recorder.know_group(f"part{number}", (0,))
    recorder.know_group("part299", (0, 1))
    found = recorder.record()
    assert [step["number"] for step in found["steps"]] == list(range(44, 300))
    assert found["steps"][0] == {"generation": 2, "number": 44, "at": "2023-11-14T22:13:20.000000+00:00"}
    assert len(found["groups"]) == 64
    assert (found["groups"][""], found["groups"]["part299"]) == ([0, 1], [0, 1])
    json.dumps(found)
