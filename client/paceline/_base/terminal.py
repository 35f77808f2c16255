"""Sentences for the person at the terminal, and the error that says how a command or a scheduler was called wrongly."""

from __future__ import annotations

import sys


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
