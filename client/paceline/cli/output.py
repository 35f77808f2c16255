"""Prints what all commands print alike: errors in one line, results as one JSON object."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import typer

from paceline._base.terminal import UsageError, say
from paceline.errors import PacelineError


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns errors of the user, the system or the network into one line and an exit code.

    The exit code is 2 for an invalid command line, as typer's own, 130 for Ctrl-C, 141 if whoever reads the output has
    gone (`| head`), as if SIGPIPE had ended the command, and 1 for everything else. Bugs keep their traceback.
    """
    try:
        yield
    except UsageError as error:
        say(str(error))
        raise typer.Exit(2) from None
    except PacelineError as error:
        say(str(error))
        raise typer.Exit(1) from None
    except BrokenPipeError:
        flush_output()
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except OSError as error:
        say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def flush_output() -> None:
    """Writes what is still to be written; if nobody reads any more, that goes nowhere, without an error at the end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def print_json(result: dict[str, Any]) -> None:
    """Prints the result as the last line of standard output."""
    print(json.dumps(result), flush=True)
