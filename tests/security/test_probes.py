"""Probes that never end: each gives way to those that come after it, and an honest one is answered meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline_server.services import probes
from paceline_server.services.probes import MOST_PROBES, PROBE
from support.coordinator import run, running


@pytest.mark.parametrize("token", ["", "a-token-that-nobody-guesses"])
def test_the_oldest_gives_way(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_PATIENCE_S", 3_600.0)

    async def main() -> None:
        async with running(**({"token": token} if token else {})) as channel:
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


def test_it_takes_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_PATIENCE_S", 0.05)

    async def main() -> None:
        async with running() as channel:
            call = channel.stream_stream(PROBE)()
            assert (await call.code()).name == "DEADLINE_EXCEEDED"
            assert "a probe takes 0.05 s at most" in await call.details()
            call = channel.stream_stream(PROBE)()
            await call.done_writing()
            assert (await call.code()).name == "INVALID_ARGUMENT"

    run(main)
