"""The last lines of a worker's output, as it has answered with them, or as its launcher has sent them. Pure."""

from __future__ import annotations

import json

_MOST_LINES, _MOST_CHARACTERS = 200, 10_000


def readable(text: str) -> str:
    """Returns a text without the characters that cannot be printed, but with its tabs and newlines.

    Other white space is a space. Escape sequences lose their first character, and so their effect.
    """
    return "\n".join(line if line.isprintable() else _readable(line) for line in text.split("\n"))


def _readable(line: str) -> str:
    return "".join(each if each.isprintable() or each == "\t" else " " if each.isspace() else "" for each in line)


def read_output_answer(data: bytes) -> tuple[list[str], str]:
    """Returns the last lines that a member has printed, or why they are not known; the answer comes from its process.

    A line has no newline in it.
    """
    try:
        found = json.loads(data)
        lines, trouble = found["lines"], found["trouble"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return [], "gave an answer that cannot be read"
    if not isinstance(lines, list) or not all(isinstance(each, str) for each in (*lines, trouble)):
        return [], "gave an answer that cannot be read"
    shown = [readable(each[:_MOST_CHARACTERS]).replace("\n", " ") for each in lines[-_MOST_LINES:]]
    return shown, readable(trouble[:500]).replace("\n", " ")
