"""A coordinator that speaks none of a member's versions is as good as away; a worker that registers ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from paceline import errors
from paceline._base.addresses import CoordinatorAddresses
from paceline._base.rpc import aio, grpc
from paceline._session import control
from paceline._session.control import ControlStream
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from paceline_protocol import OURS
from pacelinepb import ERROR_DOMAIN
from pacelinepb.v1 import session_pb2 as pb


def refusal(reason: str) -> aio.AioRpcError:
    detail = AnyMessage()
    detail.Pack(ErrorInfo(reason=reason, domain=ERROR_DOMAIN))
    code = grpc.StatusCode.FAILED_PRECONDITION
    status = rpc_status.to_status(Status(code=code.value[0], message=f"it says {reason}", details=[detail]))
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*status.trailing_metadata), status.details, None)


class Coordinator:
    """Answers each request by `answer`, which gets it, and keeps when each came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[pb.SessionRequest], Any]) -> None:
        self.now = 0.0
        self.asked: list[tuple[float, str]] = []
        self._answer = answer
        monkeypatch.setattr(control, "open_stream", self.open_stream)
        monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(control, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": self.sleep}))
        monkeypatch.setattr(control.CoordinatorChannel, "renew", self.renew)

    async def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)

    async def renew(self, timeout: float, leader: str | None = None) -> None:
        pass

    async def open_stream(self, channel: Any, first: pb.SessionRequest, *_: Any) -> tuple[Any, pb.SessionResponse]:
        self.asked.append((self.now, first.WhichOneof("event") or ""))
        answer = self._answer(first)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(cancel=lambda: None), answer


def reconnect(
    coordinator: Coordinator, config: Config | None = None, generation: int = 7, *, rejoins: bool = True
) -> tuple[Any, list[Any]]:
    """Returns a member's new stream after it has lost one, and the errors that its listener was told."""
    ended: list[Any] = []

    async def on_away(timeout: float) -> str:
        return ""

    async def main() -> Any:
        listener: Any = SimpleNamespace(on_away=on_away, on_ended=ended.append, on_registered=lambda: None)
        nothing: Any = None
        register = pb.Register(job="job", protocol_version=OURS.oldest, newest_protocol_version=OURS.newest)
        stream = ControlStream(
            CoordinatorAddresses.parse("127.0.0.1:9"), register, config or Config(), listener, nothing, IN_THE_CLEAR
        )
        stream.registered, stream.generation, stream.rejoins = pb.Registered(member_id="m1"), generation, rejoins
        try:
            return await stream._reconnect(stream._resume_request())
        finally:
            await stream.channel.close()

    return asyncio.run(main()), ended


def test_a_resume_refused_for_its_version_is_retried_and_logged_slowly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(request: pb.SessionRequest) -> Any:
        assert (request.resume.protocol_version, request.resume.newest_protocol_version) == (OURS.oldest, OURS.newest)
        return refusal("VERSION") if coordinator.now < 200 else pb.SessionResponse(registered=pb.Registered())

    coordinator = Coordinator(monkeypatch, answer)
    with caplog.at_level(logging.WARNING):
        stream, ended = reconnect(coordinator, Config(failure_timeout=20.0))
    assert stream is not None
    assert not ended
    assert {what for _, what in coordinator.asked} == {"resume"}
    assert 35 <= len(coordinator.asked) <= 45, "one each 5 s"
    said = [record.message for record in caplog.records if "goes on without a coordinator" in record.message]
    assert len(said) == 4
    assert "it says VERSION" in said[0]


@pytest.mark.parametrize(("failure_timeout", "pause"), [(3.0, 1.5), (1.0, 0.5), (60.0, 5.0)])
def test_resume_retries_pause_at_most_half_a_lease(
    monkeypatch: pytest.MonkeyPatch, failure_timeout: float, pause: float
) -> None:
    """The first one that comes back to the right coordinator starts the leases of the others."""
    coordinator = Coordinator(monkeypatch, lambda _: refusal("VERSION"))
    reconnect(coordinator, Config(failure_timeout=failure_timeout, rejoin_timeout=18.0))
    times = [now for now, _ in coordinator.asked]
    assert [later - earlier for earlier, later in pairwise(times[:-1])] == pytest.approx([pause] * (len(times) - 2))
    assert times[-1] - times[-2] <= pause
    assert times[-1] == pytest.approx(18.0), "the last attempt is at the deadline, not after it"


def test_lasting_version_refusals_end_in_orphaned_error(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(monkeypatch, lambda _: refusal("VERSION"))
    stream, ended = reconnect(coordinator)
    assert stream is None
    (error,) = ended
    assert isinstance(error, errors.OrphanedError)
    assert "the last time: it says VERSION" in str(error)


def test_a_registration_refused_for_its_version_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member whose session has ended comes back as a new one: that is no absent coordinator."""
    coordinator = Coordinator(
        monkeypatch,
        lambda request: refusal("VERSION" if request.HasField("register") else "SESSION_ENDED"),
    )
    stream, ended = reconnect(coordinator)
    assert stream is None
    (error,) = ended
    assert isinstance(error, errors.CoordinatorUnreachable)
    assert "it says VERSION" in str(error)
    assert [what for _, what in coordinator.asked] == ["resume"] * 3 + ["register"] * 3
    assert coordinator.now < 5
