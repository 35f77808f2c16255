"""The stacks that members have answered with, of themselves or of neighbours that do not answer. Pure.

Neighbours are processes of one host. One that holds the GIL cannot answer, but write its stacks on a signal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pacelinepb import MOST_PIDS
from pacelinepb.debug.folding import Process, read_stacks
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
    place = (one.boot_id, one.pid_namespace)
    return all(place) and place == (other.boot_id, other.pid_namespace)


def neighbours(silent: Sequence[Answered], there: Sequence[Member]) -> list[tuple[Member | None, list[Answered]]]:
    """Chooses who signals members that do not answer: one that is `there` for each host; None where nobody is."""
    left, found = list(silent), []
    while left:
        place = left[0].member.process
        near = [each for each in left if is_near(each.member.process, place)][:MOST_PIDS] or [left[0]]
        found.append((next((each for each in there if is_near(each.process, place)), None), near))
        left = [each for each in left if each not in near]
    return found


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
        "threads": [{"main": stack.is_main, "frames": list(stack.frames)} for stack in process.stacks],
        "trouble": process.trouble,
    }
