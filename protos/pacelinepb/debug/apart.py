"""Answers of members, read in a process of its own: what members have sent may take much memory and time to read.

`trace_request` and `stacks_request` make what the process gets as its input: a line of JSON with the lengths of the
messages after it. Its output is JSON, or a sentence that says why there is none, by its exit status (`NOTHING`,
`MUCH_MEMORY`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from pacelinepb.debug.gathered import Answered, draw_trace, gathered_from, read_answers
from pacelinepb.debug.stack_answers import process_of, processes_by, stacks_as_dict
from pacelinepb.v1.admin_pb2 import AskMembersResponse, GetJobResponse, ListEventsResponse

MOST_MEMORY = 1 << 30
"""Bytes of address space of the process."""

NOTHING, MUCH_MEMORY = 3, 4
"""Exit statuses: no member has answered with anything; the memory was not enough."""

_MOST_CPU_S = 60
"""Seconds of processor time, after which the system ends the process, if nobody else has."""

_NICE = 10

_TOLD = 4_000
"""Characters of a sentence."""


class _NothingFound(Exception):
    """The answers have nothing that can be shown; the text says why."""


def trace_request(
    answers: Sequence[Answered], detail: GetJobResponse, events: ListEventsResponse, left_out: Sequence[str]
) -> Iterator[bytes]:
    """Yields the input for a trace; `left_out` are sentences about members that were not asked."""
    messages = [detail.SerializeToString(), events.SerializeToString(), *map(_written, answers)]
    return _request({"what": "trace", "left_out": list(left_out)}, messages)


def stacks_request(
    answers: Sequence[Answered], job: str, said: Sequence[tuple[Sequence[Answered], Answered | None]]
) -> Iterator[bytes]:
    """Yields the input for stacks; `said` are members that are silent, with what a neighbour says of them."""
    place = {each.member.member_id: number for number, each in enumerate(answers)}
    silent = [[place[each.member.member_id] for each in of] for of, _ in said]
    helped = [neighbour is not None for _, neighbour in said]
    messages = [_written(each) for each in (*answers, *(neighbour for _, neighbour in said if neighbour))]
    return _request({"what": "stacks", "job": job, "silent": silent, "helped": helped}, messages)


def _request(head: dict[str, Any], messages: Sequence[bytes]) -> Iterator[bytes]:
    yield json.dumps(head | {"lengths": [len(each) for each in messages]}).encode() + b"\n"
    yield from messages


def _written(each: Answered) -> bytes:
    message = AskMembersResponse(member=each.member, in_view=each.in_view, data=each.data, trouble=each.trouble)
    message.asked_at.FromNanoseconds(round(each.asked_at * 1e9))
    message.answered_at.FromNanoseconds(round(each.answered_at * 1e9))
    return message.SerializeToString()


def main() -> None:
    """Reads a request from standard input, and answers on standard output."""
    _take_little()
    status, text = 0, ""
    try:
        _answer(sys.stdin.buffer, sys.stdout.buffer)
    except _NothingFound as error:
        status, text = NOTHING, str(error)
    except MemoryError:
        status = MUCH_MEMORY
    sys.stdout.buffer.write(text[:_TOLD].encode(errors="replace"))
    sys.stdout.buffer.flush()
    sys.exit(status)


def _take_little() -> None:
    """Gives others the processor first, and bounds memory and time, where the system can."""
    with suppress(ImportError, AttributeError, OSError, ValueError):
        os.nice(_NICE)
    try:
        import resource
    except ImportError:  # not on Windows
        return
    for what, most in ((resource.RLIMIT_AS, MOST_MEMORY), (resource.RLIMIT_CPU, _MOST_CPU_S)):
        with suppress(OSError, ValueError):
            resource.setrlimit(what, (most, most))


def _answer(source: BinaryIO, target: BinaryIO) -> None:
    head = json.loads(source.readline())
    messages = [source.read(length) for length in head["lengths"]]
    if head["what"] == "trace":
        detail, events = GetJobResponse.FromString(messages[0]), ListEventsResponse.FromString(messages[1])
        answers = read_answers(map(AskMembersResponse.FromString, messages[2:]))
        found = gathered_from(answers, detail)
        found.notes.extend(head["left_out"])
        if not found.records:
            nothing = ["no flight record is there", *(found.missing if answers else [found.source])]
            raise _NothingFound("; ".join(nothing))
        _dump(target, draw_trace(found, events.events), "traceEvents")
    else:
        _dump(target, _stacks(head, [*map(AskMembersResponse.FromString, messages)]), "processes")


def _stacks(head: dict[str, Any], messages: Sequence[AskMembersResponse]) -> dict[str, Any]:
    said = [read_answers([each])[0] for each in messages]
    count = len(said) - sum(head["helped"])
    answers, neighbours = said[:count], iter(said[count:])
    found = {number: process_of(each) for number, each in enumerate(answers)}
    for of, is_helped in zip(head["silent"], head["helped"], strict=True):
        silent = [answers[number] for number in of]
        found |= zip(of, processes_by(head["job"], silent, next(neighbours) if is_helped else None), strict=True)
    return {"processes": [stacks_as_dict(found[number], each) for number, each in enumerate(answers)]}


def _dump(target: BinaryIO, made: dict[str, Any], long: str) -> None:
    """Writes JSON, its `long` list piece by piece: it may have many megabytes."""
    rest = json.dumps({name: value for name, value in made.items() if name != long})
    target.write(f"{{{json.dumps(long)}: [".encode())
    for number, each in enumerate(made[long]):
        target.write((", " if number else "").encode() + json.dumps(each).encode())
    target.write(("]" + (", " if len(made) > 1 else "") + rest[1:]).encode())
