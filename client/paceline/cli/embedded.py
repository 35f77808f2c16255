"""A coordinator inside this process, for commands that need one and were given none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from paceline._loop import loop_thread

__all__ = ["embedded_coordinator"]

_STOP_GRACE_S = 1.0


@contextlib.contextmanager
def embedded_coordinator() -> Iterator[str]:
    """Runs a coordinator on loopback, at a free port, with its state in memory; yields its address."""
    from paceline_server.app import Coordinator
    from paceline_server.settings import ServerSettings

    coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0"))
    thread = loop_thread()  # the one loop of this process: aio objects of a second one would disturb it
    address = thread.run(coordinator.start())
    try:
        yield address
    finally:
        thread.run(coordinator.stop(_STOP_GRACE_S))
