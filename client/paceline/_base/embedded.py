"""A coordinator inside this process, for tests, `paceline run`, the demo and rank 0 of a torch job."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline._base.waits import loop_thread

_STOP_GRACE = 1.0  # seconds for sessions to end by themselves


@contextmanager
def coordinator(
    *,
    listen: str = "127.0.0.1:0",
    state: Path | None = None,
    for_good: bool = False,
    on_page: Callable[[str], None] | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Runs a coordinator on the loop thread of this process; yields its address, "host:port".

    It stops at the end of the block, or when the interpreter exits, after the sessions that were opened in the block.

    Args:
        listen: the address to listen at; by default a free port on loopback.
        state: file that keeps the coordinator's state across restarts; by default it is in memory only.
        for_good: no other coordinator will take its place: when it stops it tells members so, and they do not look for
            it.
        on_page: called with the URL of the page, if `http` in `settings` says where to serve one.
        settings: other fields of `paceline_server.ServerSettings`: tls_cert, token_file, ... It takes each
            `failure_timeout` that a coordinator can, for it serves the run that has started it.

    Raises:
        OSError: the port is in use.
        ValueError: a setting is invalid.
    """
    # Only here does the client's package load the server's, and only when a coordinator is embedded.
    from paceline_server.app import Coordinator
    from paceline_server.settings import ServerSettings
    from paceline_server.storage.checks import MOST_SILENCE_S

    settings = {"max_silence": MOST_SILENCE_S, **settings}
    server = Coordinator(ServerSettings(listen=listen, state_path=state, **settings))
    thread = loop_thread()  # aio objects of a second loop in one process would disturb each other
    owner, stopped = os.getpid(), False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            if os.getpid() == owner:  # a forked child has this object, but not its loop thread
                thread.run(server.stop(_STOP_GRACE, for_good=for_good))

    address = thread.run(server.start())
    if on_page is not None and server.http_url:
        on_page(server.http_url)
    # If the block is never left, the garbage collector would close it, perhaps after modules are gone: too late.
    atexit.register(stop)
    try:
        yield address
    finally:
        if not stopped:
            atexit.unregister(stop)
            stop()
