"""Runs a coordinator as a process of its own: until SIGTERM or Ctrl-C, then it drains."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from paceline_server._process import raise_file_limit, share_one_heap
from paceline_server.app import Coordinator
from paceline_server.settings import ServerSettings

__all__ = ["serve"]


def serve(settings: ServerSettings, announce: Callable[[str], None] | None = None, grace: float = 1.0) -> None:
    """Serves until SIGTERM or SIGINT; a second one cuts the drain short. One that comes while it starts ends that.

    Args:
        settings: the coordinator's settings.
        announce: called with "host:port" once the coordinator listens.
        grace: seconds for calls in progress to end.

    Raises:
        PortInUse: somebody listens at the address already.
        StateUnusable: the state file cannot be used.
        TlsUnusable, TokensUnusable: of the files that the settings name.
        OSError: the address cannot be listened at for another reason.
    """
    share_one_heap()
    raise_file_limit()
    asyncio.run(_serve(settings, announce, grace))


async def _serve(settings: ServerSettings, announce: Callable[[str], None] | None, grace: float) -> None:
    coordinator = Coordinator(settings)
    asked = [asyncio.Event(), asyncio.Event()]

    def on_signal() -> None:
        next((event for event in asked if not event.is_set()), asked[-1]).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.create_task(coordinator.start())
    told = asyncio.create_task(asked[0].wait())
    await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # it may be a file or a resolver that hangs
        starting.cancel()
        await asyncio.wait({starting})
        if starting.cancelled():
            return
    address = starting.result()
    if announce is not None:
        announce(address)
    await told
    stopping = asyncio.create_task(coordinator.stop(grace))
    again = asyncio.create_task(asked[1].wait())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if stopping.done():
        stopping.result()
    else:
        stopping.cancel()
