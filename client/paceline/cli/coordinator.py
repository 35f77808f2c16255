"""`paceline coordinator`: the server in the foreground, until a signal ends it."""

from __future__ import annotations

import logging
from pathlib import Path

from paceline.cli.address import endpoint
from paceline.cli.output import UsageError, say

__all__ = ["run_coordinator"]


def run_coordinator(listen: str, state: Path | None, restart_after: float | None = None) -> None:
    """Serves until SIGINT or SIGTERM, which is how a coordinator ends: with exit code 0.

    Raises:
        UsageError: the address is malformed, or a number cannot be.
        OSError: the port is in use, or the state file cannot be used.
    """
    from paceline_server.serve import serve
    from paceline_server.settings import ServerSettings

    where = endpoint(listen)
    if restart_after is not None and not restart_after > 0:
        raise UsageError(f"--restart-after must be above 0, not {restart_after:g}")
    # Jobs, views and losses, as they come: what whoever started this wants to see.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("paceline_server.app").setLevel(logging.WARNING)  # start and stop are said below

    def announce(address: str) -> None:
        say(f"the coordinator listens on {address}")
        if where.is_loopback:
            say(f"only this machine can reach it; --listen 0.0.0.0:{where.port} lets others in, authenticating nobody")

    serve(ServerSettings(listen=str(where), state_path=state, restart_after=restart_after), announce)
    say("the coordinator has stopped")
