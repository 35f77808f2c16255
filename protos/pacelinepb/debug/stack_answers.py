"""The stacks that members have answered with, of themselves or of other processes of their hosts. Pure."""

from __future__ import annotations

import json
from typing import Any

from pacelinepb.debug.folding import Process, read_stacks
from pacelinepb.debug.gathered import Answered

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


def run_it_there(job: str, answer: Answered) -> str:
    """Says how to see the stacks of a process that does not answer."""
    process = answer.member.process
    return f"run paceline debug stacks {job} on {process.host} (pid {process.pid}), as the user of the job"


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
