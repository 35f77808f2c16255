"""Runs a coordinator in a process of its own until SIGTERM or Ctrl-C, and then drains it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from paceline_server.failover import FailoverCoordinator, make_coordinator
from paceline_server.process_limits import collect_rarely, raise_file_limit, share_one_heap
from paceline_server.settings import ServerSettings


def serve(settings: ServerSettings, announce: Callable[[str, str], None] | None = None, grace: float = 1.0) -> None:
    """Serves until SIGTERM or SIGINT; a second signal cuts the drain short. A signal during the start ends the start.

    `announce` is called with "host:port" and the URL of the page, empty for none, once the coordinator listens. Calls
    in progress have `grace` seconds to end. Raises what `Coordinator.start` does.
    """
    share_one_heap()
    raise_file_limit()
    asyncio.run(_serve(settings, announce, grace))


async def _serve(settings: ServerSettings, announce: Callable[[str, str], None] | None, grace: float) -> None:
    coordinator = make_coordinator(settings)
    asked = [asyncio.Event(), asyncio.Event()]

    def on_signal() -> None:
        next((event for event in asked if not event.is_set()), asked[-1]).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.create_task(coordinator.start())
    told = asyncio.create_task(asked[0].wait())
    await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # a file or a resolver may hang
        starting.cancel()
        await asyncio.wait({starting})
        if starting.cancelled():
            return
    address = starting.result()
    collect_rarely()
    if announce is not None:
        announce(address, coordinator.http_url)
    if isinstance(coordinator, FailoverCoordinator):
        ended = asyncio.create_task(coordinator.wait_for_termination())
        await asyncio.wait({told, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()  # a bug has ended it: raises that
        ended.cancel()
    else:
        await told
    stopping = asyncio.create_task(coordinator.stop(grace))
    again = asyncio.create_task(asked[1].wait())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if stopping.done():
        stopping.result()
    else:
        stopping.cancel()
