"""The command line. Nothing of it is loaded by `import paceline`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command that the arguments name; the entry point of `paceline`."""
    try:
        from paceline.cli.app import app

        app(prog_name="paceline")
    except KeyboardInterrupt:  # before or after the part that a command guards by itself
        sys.exit(130)
