"""The command line. `import paceline` loads none of it."""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command that the arguments name; the entry point of `paceline`."""
    try:
        from paceline.cli.app import app

        app(prog_name="paceline")
    except SystemExit as end:
        # typer prints help and usage outside of commands, and ends with 1 if the reader has gone (`| head`).
        if isinstance(end.__context__, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        raise
    except KeyboardInterrupt:  # outside the part in which the command itself catches it
        sys.exit(130)
    finally:
        from paceline.cli.output import flush_output

        flush_output()
