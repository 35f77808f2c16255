"""The command line. `import paceline` loads none of it."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command that the arguments name; the entry point of `paceline`."""
    try:
        from paceline.cli.app import app

        app(prog_name="paceline")
    except KeyboardInterrupt:  # outside the part in which the command itself catches it
        sys.exit(130)
