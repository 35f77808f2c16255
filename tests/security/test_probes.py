"""Probes that never end give way to later ones, and a real probe is answered meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline_server.services.probes import MOST_PROBES, PROBE, Probes
from support.coordinator import run, running


@pytest.mark.parametrize("token", ["", "a-token-that-nobody-guesses"])
def test_the_oldest_unfinished_probe_gives_way(token: str) -> None:
    async def main() -> None:
        async with running(probes=Probes(patience_s=3_600.0), **({"token": token} if token else {})) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            silent: list[Any] = [channel.stream_stream(PROBE)() for _ in range(3 * MOST_PROBES)]
            ends = asyncio.as_completed([call.code() for call in silent])
            assert {(await next(ends)).name for _ in range(2 * MOST_PROBES)} == {"DEADLINE_EXCEEDED"}
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
            assert (await next(ends)).name == "DEADLINE_EXCEEDED", "the honest one took its place"
            assert sum(not call.done() for call in silent) == MOST_PROBES - 1
            for call in silent:
                call.cancel()
            for end in ends:
                assert (await end).name == "CANCELLED"

    run(main)


def test_an_unfinished_probe_times_out() -> None:
    async def main() -> None:
        async with running(probes=Probes(patience_s=0.05)) as channel:
            call = channel.stream_stream(PROBE)()
            assert (await call.code()).name == "DEADLINE_EXCEEDED"
            assert "a probe takes 0.05 s at most" in await call.details()
        async with running(probes=Probes(patience_s=3_600.0)) as channel:
            call = channel.stream_stream(PROBE)()
            await call.done_writing()
            assert (await call.code()).name == "INVALID_ARGUMENT"

    run(main)


class Call:
    """What grpc gives a handler, of a call whose request comes when it is told to."""

    def __init__(self, connection: str) -> None:
        self._connection = connection
        self.comes = asyncio.Event()
        self.ended = ""

    def peer(self) -> str:
        return self._connection

    async def read(self) -> str:
        await self.comes.wait()
        return "request"

    async def write(self, answer: str) -> None:
        self.ended = answer

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.ended = code.name


def test_a_connection_with_many_probes_does_not_end_others_probes() -> None:
    """As after a flood, when thousands of calls reach the handler before the request of an honest one is read."""

    async def answer(request: str, context: Call) -> str:
        return f"an answer to a {request}"

    async def main() -> None:
        served = Probes(patience_s=3_600.0)

        async def open_one(connection: str) -> tuple[Call, asyncio.Task[None]]:
            call = Call(connection)
            task = asyncio.create_task(served.serve(answer, call))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            return call, task

        honest, served_well = await open_one("the prober")
        others = [await open_one(f"stranger {number % 27}") for number in range(20 * MOST_PROBES)]
        honest.comes.set()
        await served_well
        assert honest.ended == "an answer to a request"
        ends = asyncio.as_completed([task for _, task in others])
        for _ in range(len(others) - MOST_PROBES):
            await next(ends)
        assert {call.ended for call, _ in others} == {"DEADLINE_EXCEEDED", ""}
        for _, task in others:
            task.cancel()

    run(main)
