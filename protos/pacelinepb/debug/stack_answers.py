"""The stacks that members have answered with, of themselves or of neighbours that do not answer. Pure.

Neighbours are processes of one host. One that holds the GIL cannot answer, but write its stacks on a signal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pacelinepb import MOST_PIDS
from pacelinepb.debug.folding import Process, Stack, read_stacks, shorten
from pacelinepb.debug.gathered import Answered
from pacelinepb.v1.session_pb2 import Member, ProcessIdentity

SIGNALLED_S = 5.0
"""Seconds to wait for a member that signals others."""

_MOST_TROUBLE = 500

_UNREADABLE = "gave an answer that cannot be read"


def process_of(answer: Answered) -> Process:
    """Reads what a member has answered about itself."""
    if answer.trouble:
        return Process(str(answer), answer.rank, trouble=answer.trouble)
    text, trouble = read_stacks_answer(answer.data, 0)
    return Process(str(answer), answer.rank, read_stacks(text), trouble)


def read_stacks_answer(data: bytes, number: int) -> tuple[str, str]:
    """Returns the text of a process's stacks, and why there are none; the answer comes from another process."""
    try:
        found = json.loads(data)["stacks"][number]
        text, trouble = found["text"], found["trouble"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return "", _UNREADABLE
    if not isinstance(text, str) or not isinstance(trouble, str):
        return "", _UNREADABLE
    return text, trouble[:_MOST_TROUBLE]


def is_near(one: ProcessIdentity, other: ProcessIdentity) -> bool:
    """True if the one process can signal the other by its pid: they share a kernel and a pid namespace."""
    return all(_place(one)) and _place(one) == _place(other)


def neighbours(silent: Sequence[Answered], there: Sequence[Member]) -> list[tuple[Member | None, list[Answered]]]:
    """Chooses who signals members that do not answer: one that is `there` of the same host; None where nobody is.

    One signals `MOST_PIDS` others at a time. With more on a host the members there take turns.
    """
    helpers: dict[tuple[str, int], list[Member]] = {}
    for member in there:
        helpers.setdefault(_place(member.process), []).append(member)
    near: dict[tuple[str, int], list[Answered]] = {}
    for number, each in enumerate(silent):
        place = _place(each.member.process)
        near.setdefault(place if all(place) else ("", -number), []).append(each)
    found: list[tuple[Member | None, list[Answered]]] = []
    for place, those in near.items():
        able = helpers.get(place, []) if all(place) else []
        for turn, first in enumerate(range(0, len(those), MOST_PIDS)):
            found.append((able[turn % len(able)] if able else None, those[first : first + MOST_PIDS]))
    return found


def _place(process: ProcessIdentity) -> tuple[str, int]:
    return process.boot_id, process.pid_namespace


def processes_by(job: str, silent: Sequence[Answered], said: Answered | None) -> list[Process]:
    """Reads what a neighbour of silent members has `said` of them, in their order; None if they have none."""
    found = []
    for number, each in enumerate(silent):
        text = ""
        if said is None:
            process = each.member.process
            advice = f"run paceline debug stacks {job} on {process.host} (pid {process.pid}), as the user of the job"
            trouble = f"{each.trouble}, nor does another member of its host: {advice}"
        else:
            text, trouble = ("", said.trouble) if said.trouble else read_stacks_answer(said.data, number)
            trouble = f"{each.trouble}; {trouble}" if trouble else ""
        found.append(Process(str(each), each.rank, read_stacks(text), trouble))
    return found


def stacks_as_dict(process: Process, answer: Answered) -> dict[str, Any]:
    """Returns a process as `paceline debug stacks --json` prints it, and as the page gets it."""
    return {
        "rank": process.rank,
        "member_id": answer.member.member_id,
        "host": answer.member.process.host,
        "pid": answer.member.process.pid,
        "threads": [_thread_as_dict(stack) for stack in process.stacks],
        "trouble": process.trouble,
    }


def _thread_as_dict(stack: Stack) -> dict[str, Any]:
    found = {"main": stack.is_main, "library": stack.is_library, "frames": list(stack.frames)}
    short = shorten(stack).frames
    return found if short == stack.frames else found | {"short": list(short)}
