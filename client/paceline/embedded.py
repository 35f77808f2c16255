"""A coordinator inside this process: for tests, for `paceline run` and for the demo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline._loop import loop_thread

__all__ = ["coordinator"]

_STOP_GRACE = 1.0  # seconds for sessions to end by themselves


@contextmanager
def coordinator(*, listen: str = "127.0.0.1:0", state: Path | None = None, **settings: Any) -> Iterator[str]:
    """Runs a coordinator on the loop thread of this process; yields its address, "host:port".

    Args:
        listen: where; a free port on loopback if left out.
        state: file that keeps its state across restarts; in memory if left out.
        settings: more of `paceline_server.ServerSettings`: tls_cert, token_file, ...

    Raises:
        OSError: the port is in use.
        ValueError: a setting cannot be.
    """
    # The one place where the client's package loads the server's: lazily, for those who embed it.
    from paceline_server.app import Coordinator
    from paceline_server.settings import ServerSettings

    server = Coordinator(ServerSettings(listen=listen, state_path=state, **settings))
    thread = loop_thread()  # aio objects of a second loop in one process would disturb each other
    address = thread.run(server.start())
    try:
        yield address
    finally:
        thread.run(server.stop(_STOP_GRACE))
