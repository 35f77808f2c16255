"""Sentences for the person at the terminal, and the error that says how a command or a scheduler was called wrongly."""

from __future__ import annotations

import sys

ESCAPES = (
    r"(?:(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI
    r"|\x1b[ -/]*[0-~]?|[\x0e\x0f\x80-\x9f])"  # other escapes, shifts to another alphabet, C1
)
"""A regular expression for sequences that a terminal obeys (ECMA-48, 5 and 8.3). The end of each may be missing."""


class UsageError(ValueError):
    """The command line asks for something impossible; the text says what would work."""


def say(text: str) -> None:
    """Prints a sentence of the command itself on standard error; text that it quotes cannot move the cursor."""
    lines = "\n".join(map(printable, text.split("\n")))
    print(f"paceline: {lines}", file=sys.stderr, flush=True)  # noqa: T201  # it is for the person who started this


def printable(text: str) -> str:
    """Escapes the characters that a terminal would obey instead of showing: control and formatting characters."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
