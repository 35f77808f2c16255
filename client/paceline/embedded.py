"""A coordinator inside this process: for tests, for `paceline run`, for the demo and for rank 0 of a torch job."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline._loop import loop_thread

__all__ = ["coordinator"]

_STOP_GRACE = 1.0  # seconds for sessions to end by themselves


@contextmanager
def coordinator(
    *, listen: str = "127.0.0.1:0", state: Path | None = None, for_good: bool = False, **settings: Any
) -> Iterator[str]:
    """Runs a coordinator on the loop thread of this process; yields its address, "host:port".

    It stops at the end of the block, or when the interpreter exits, after the sessions that were opened within.

    Args:
        listen: where; a free port on loopback if left out.
        state: file that keeps its state across restarts; in memory if left out.
        for_good: no other takes its place: members are told so when it stops, and do not look for it.
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
    owner, stopped = os.getpid(), False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            if os.getpid() == owner:  # a forked child has this object, and no loop thread behind it
                thread.run(server.stop(_STOP_GRACE, for_good=for_good))

    address = thread.run(server.start())
    # A block that is never left is closed by the garbage collector, which may be too late: modules may be gone by then.
    atexit.register(stop)
    try:
        yield address
    finally:
        if not stopped:
            atexit.unregister(stop)
            stop()
