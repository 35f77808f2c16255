"""`python -m paceline_server`: a coordinator in the foreground. `paceline coordinator` is the same with more colour."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from paceline_server.serve import serve
from paceline_server.settings import ServerSettings


def main() -> int:
    """Parses the arguments and serves; returns the exit code."""
    parser = argparse.ArgumentParser(prog="paceline_server", description="Paceline's coordinator.")
    parser.add_argument("--listen", default=ServerSettings().listen, metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("--state", type=Path, metavar="FILE", help="keep state in this SQLite file")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = ServerSettings(listen=arguments.listen, state_path=arguments.state)
        serve(settings, announce=_announce)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
    return 0


def _announce(address: str) -> None:
    # One line on standard output, so that whoever started us can read the port.
    sys.stdout.write(f"listening on {address}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
