"""Measures a round of W streams in grpc alone: each writes a message, and when all have arrived each gets one back.

A barrier of W members cannot cost less on this machine at this time, so the coordinator's barrier is compared with it.
As a script, `serve COUNT` prints its address, and `clients ADDRESS COUNT ROUNDS` prints the median in seconds.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from grpc import aio, method_handlers_generic_handler, stream_stream_rpc_method_handler

__all__ = ["bare_round"]

_MESSAGE = bytes(40)
"""About as long as a barrier's messages."""


def bare_round(count: int, rounds: int = 20) -> float:
    """Returns the median seconds of a round of `count` streams, each on its own connection."""
    server = subprocess.Popen([sys.executable, __file__, "serve", str(count)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        words = [sys.executable, __file__, "clients", address, str(count), str(rounds)]
        return float(subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True).stdout)
    finally:
        server.kill()
        server.communicate()


async def _serve(count: int) -> None:
    waiting: list[asyncio.Future[None]] = []

    async def rounds(_: Any, context: Any) -> None:
        while await context.read() is not aio.EOF:  # type: ignore[attr-defined]  # not in grpc-stubs
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.append(mine)
            if len(waiting) == count:
                for each in waiting:
                    each.set_result(None)
                waiting.clear()
            await mine
            await context.write(_MESSAGE)

    server = aio.server()
    handlers = {"Rounds": stream_stream_rpc_method_handler(rounds)}
    server.add_generic_rpc_handlers((method_handlers_generic_handler("bare", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def _clients(address: str, count: int, rounds: int) -> float:
    channels = [aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(count)]
    calls: list[Any] = [channel.stream_stream("/bare/Rounds")() for channel in channels]

    async def take_part(call: Any) -> None:
        await call.write(_MESSAGE)
        await call.read()

    times = []
    for _ in range(rounds + 1):  # the first one connects
        begun = time.monotonic()
        await asyncio.gather(*map(take_part, calls))
        times.append(time.monotonic() - begun)
    return statistics.median(times[1:])


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if sys.argv[1] == "serve":
        asyncio.run(_serve(int(sys.argv[2])))
    else:
        print(asyncio.run(_clients(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))), flush=True)
        os._exit(0)  # closing a thousand channels properly takes seconds
