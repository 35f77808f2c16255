"""Whoever is turned away for the crowd tries again, for so long; nobody else does. The clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from paceline._base.rpc import aio, grpc
from paceline._elastic import peer_calls
from paceline._elastic.peer_calls import refuses_for_now, retry_while_refused
from pacelinepb import ERROR_DOMAIN


def error(code: grpc.StatusCode, reason: str = "") -> aio.AioRpcError:
    """A refusal; with a reason it is a door's own."""
    if not reason:
        return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), "failed to connect")
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(domain=ERROR_DOMAIN, reason=reason))
    status = rpc_status.to_status(status_pb2.Status(code=code.value[0], message="too many", details=[detail]))
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*status.trailing_metadata), "too many")


CROWDED = error(grpc.StatusCode.UNAVAILABLE, "LIMIT")
OTHERS = {
    "nobody is there": error(grpc.StatusCode.UNAVAILABLE),
    "it is leaving": error(grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    "the request is too long": error(grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT"),
}


class Clock:
    """Sleeps take no time but the clock's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    class Asyncio:
        get_running_loop = staticmethod(lambda: clock)
        sleep = staticmethod(clock.sleep)

    monkeypatch.setattr(peer_calls, "asyncio", Asyncio)
    return clock


def calls(*answers: Any) -> tuple[Any, Iterator[Any]]:
    """A call that gives one answer after the other, and those that it has yet to give."""
    left = iter(answers)

    async def call() -> Any:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return call, left


def test_refuses_for_now_is_true_only_for_a_crowd_or_secret_renewal() -> None:
    assert refuses_for_now(CROWDED)
    assert refuses_for_now(error(grpc.StatusCode.UNAVAILABLE, "UNAUTHENTICATED")), "the job's secret is being renewed"
    assert not any(map(refuses_for_now, OTHERS.values()))


def test_a_crowded_call_is_retried_with_growing_pauses(clock: Clock) -> None:
    call, _ = calls(*[CROWDED] * 6, "in")
    assert asyncio.run(retry_while_refused(call, 3.0)) == "in"
    assert clock.slept == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_retries_end_at_the_time_limit_with_the_refusal(clock: Clock) -> None:
    call, left = calls(*[CROWDED] * 9)
    with pytest.raises(aio.AioRpcError) as caught:
        asyncio.run(retry_while_refused(call, 1.0))
    assert caught.value is CROWDED
    assert sum(clock.slept) <= 1.0
    assert len(list(left)) == 4


@pytest.mark.parametrize("what", OTHERS)
def test_other_errors_are_raised_without_a_retry(what: str, clock: Clock) -> None:
    call, _ = calls(OTHERS[what], "in")
    with pytest.raises(aio.AioRpcError) as caught:
        asyncio.run(retry_while_refused(call, 3.0))
    assert caught.value is OTHERS[what]
    assert not clock.slept
