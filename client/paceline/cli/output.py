"""What all commands have in common in what they print: errors in one line, results as one JSON object."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import typer

from paceline.errors import PacelineError

__all__ = ["UsageError", "one_line_errors", "print_json", "printable", "say"]


class UsageError(Exception):
    """The command line asks for what cannot be; the text says what would do."""


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns what a user can have done wrong, or a network, into one line and an exit code.

    Exit codes: 2 for a command line that cannot be, as for typer's own refusals; 1 for everything else; 130 for Ctrl-C.
    Bugs keep their traceback.
    """
    try:
        yield
    except UsageError as error:
        say(str(error))
        raise typer.Exit(2) from None
    except PacelineError as error:
        say(str(error))
        raise typer.Exit(1) from None
    except OSError as error:
        say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def say(text: str) -> None:
    """One sentence of the command's own, on standard error. What it quotes cannot move the cursor."""
    lines = "\n".join(map(printable, text.split("\n")))
    print(f"paceline: {lines}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """A text with escapes in place of what a terminal would not show but obey: control and formatting characters."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def print_json(result: dict[str, Any]) -> None:
    """The result as the last line of standard output."""
    print(json.dumps(result), flush=True)
