"""Text from outside the program: addresses, sizes, what workers write to the pipe to their launcher, their answers."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline._base.activity import FlightRecorder
from paceline._base.addresses import parse_endpoint
from paceline._session.answers import output_answer, record_answer, whole_record
from paceline._session.output_file import MOST_BYTES, newest_text, readable_lines
from paceline._session.stack_file import own_stacks
from paceline.cli.debug.stuck import find_stuck
from paceline.cli.launcher.console import Console, LogFiles
from paceline.cli.launcher.last_lines import LastLines
from paceline.cli.launcher.printed import LineSplitter
from paceline.cli.launcher.worker import Worker
from paceline.cli.sizes import parse_sizes
from pacelinepb.debug.chrome_trace import make_trace
from pacelinepb.debug.folding import Process, fold, read_stacks
from pacelinepb.debug.output_answers import read_output_answer
from pacelinepb.debug.records import read_record
from support.chrome_format import check_trace

__all__ = ["SEEDS", "address", "news", "output", "record", "sizes", "stacks"]

_PID = 4711


def address(data: bytes) -> None:
    """An address that is accepted is read as the same again; byte 0 says whether a port may be left out."""
    text = data[1:].decode("utf-8", "surrogateescape")
    try:
        found = parse_endpoint(text, default_port=7400 if data[0] & 1 else None) if data else None
    except ValueError:
        return
    if found is not None:
        assert 0 <= found.port < 1 << 16
        assert parse_endpoint(str(found)) == found
        assert isinstance(found.is_loopback, bool)


def sizes(data: bytes) -> None:
    """Sizes are whole float32 elements, one for each word."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        found = parse_sizes(text)
    except ValueError:
        return
    assert len(found) == text.count(",") + 1
    assert all(size > 0 and size % 4 == 0 for size in found)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _worker(replica_size: int | None) -> Worker:
    worker = object.__new__(Worker)  # without a process
    worker.index, worker.rank, worker._replica_size = 3, None, replica_size
    worker._blamed, worker._lost_mate, worker._unfinished = [], False, False
    worker.killed_as, worker.view, worker._waits, worker._has_left = "", None, False, False
    worker._process = SimpleNamespace(pid=_PID, returncode=1)  # type: ignore[assignment]
    return worker


def news(data: bytes) -> None:
    """Whatever stands on the pipe, and however it is cut, the launcher goes on, and can show and log it."""
    worker, splitter = _worker(2 if data[:1] < b"\x80" else None), LineSplitter(max_line_bytes=4096)
    terminal = _Terminal()
    logs = object.__new__(LogFiles)
    logs._folder, logs._files, logs._unended = Path(os.devnull), {worker.index: (kept := io.BytesIO())}, {}
    console = Console(logs, terminal, terminal)
    try:
        cut = data[0] + 1 if data else 1
        parts = [part for at in range(1, len(data), cut) for part in splitter.feed(data[at : at + cut])]
        parts += splitter.finish()
        assert b"".join(part.raw for part in parts) == data[1:]
        for part in parts:
            console.line(worker, "stdout", part)
        assert kept.getvalue().endswith(data[1:])
        for part in parts:
            record = worker.heard(part.text)
            if record is None:
                continue
            assert isinstance(record, dict)
            assert worker.rank is None or type(worker.rank) is int
            assert worker.view is None or not worker.is_behind([worker.view])
            console.record(worker, record)
            console.line(worker, "stdout", part)
            console.ended(worker, worker.end(), False)
    finally:
        console.close()


def _lines(*records: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


_VIEW = {"kind": "view", "pid": _PID, "rank": 1, "world_size": 2, "generation": 1}


def _news_seeds() -> Sequence[bytes]:
    failed = {"kind": "error", "ranks": [1], "mate": True}
    return [
        b"\xff" + _lines({"kind": "waiting", "reason": "3 of 4 workers are here"}, _VIEW, failed),
        b"\x05" + _lines({**_VIEW, "rank": True}, {**_VIEW, "rank": -1}, {**_VIEW, "rank": "\ud800"}),
        b"\x00" + b"no JSON\r\n" + _lines({"kind": "waiting", "reason": "\ud800"}) + b"[" * 3000,
    ]


def record(data: bytes) -> None:
    """A record that is accepted can be compared with others and drawn; two members may say the same."""
    try:
        found = read_record(data)
    except ValueError:
        return
    both = [found, dataclasses.replace(found, rank=None if found.rank is None else found.rank + 1, member_id="other")]
    report = find_stuck(both, {})
    assert report.findings
    json.dumps([each.as_dict() for each in report.findings])
    check_trace(make_trace(both))


def stacks(data: bytes) -> None:
    """Whatever a worker's file holds, there is at most one main thread, and nothing is longer than the text."""
    text = data.decode("utf-8", "replace")
    found = read_stacks(text)
    assert sum(each.is_main for each in found) == bool(found)
    assert sum(len(frame) for each in found for frame in each.frames) <= len(text)
    fold([Process("a", 0, found), Process("b", 1, found)])


def output(data: bytes) -> None:
    """Whatever a member answers, no line that is shown controls a terminal; nor does what a launcher keeps."""
    lines, trouble = read_output_answer(data)
    for line in (*lines, trouble, *readable_lines(data), *newest_text(readable_lines(data)).split("\n")):
        assert all(character.isprintable() or character == "\t" for character in line)
    assert len(newest_text(readable_lines(data)).encode()) <= 2_000
    last, splitter = LastLines(), LineSplitter(max_line_bytes=4096)
    for at in range(0, len(data), 100):
        last.add(splitter.feed(data[at : at + 100]))
    assert len(last.text([splitter.unended])) <= MOST_BYTES


def _record_seeds() -> list[bytes]:
    recorder = FlightRecorder(8)
    recorder.know_group("", (0, 1))
    recorder.step(3, 7)
    recorder.issue("", 1, b"broadcast root=0 float32[4,2]", 3).begin()
    recorder.issue("split1", 2, b"all_reduce op=sum float32[1024]", 3, 1)
    message = recorder.issue("", 0, b"send to=1 tag=7 int64[]", 3)
    message.begin()
    message.end(ValueError("text"))
    described = {
        "job": "digits",
        "rank": 0,
        "size": 2,
        "generation": 3,
        "host": "h",
        "member_id": "m",
        "links": ["shm"],
    }
    whole = whole_record(recorder, described)
    return [record_answer(whole, 1.5), record_answer(whole_record(None, {}), 2.5)]


SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {
    "address": lambda: [
        b"\x00localhost:7400",
        b"\x00[::1]:0",
        b"\x01host",
        b"\x01[fe80::1]",
        b"\x00[]:1",
        b"\x00a:65536",
    ],
    "sizes": lambda: [b"1KiB,16MiB,4096", b" 4 kb , 1GiB", b"0", "\u0664KiB".encode()],
    "news": _news_seeds,
    "record": _record_seeds,
    "output": lambda: [
        output_answer({}, 1.5),
        b'{"lines": ["\\u001b[2J", "a"], "trouble": ""}',
        b"\x1b[1mb\r\n\xff\tc\n\x1b[A",
    ],
    "stacks": lambda: [
        b'Thread 0x00007f00 [loop] (most recent call first):\n  File "/a/paceline/x.py", line 3 in run\n\n'
        b'Current thread 0x00007f01 (most recent call first):\n  <no Python frame>\n  File "t.py", line 12 in step\n',
        own_stacks().encode(),
    ],
}
