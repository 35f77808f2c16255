"""A member that waits says what for, and since when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.elastic import waiting
from paceline.elastic.place import Phase


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def member() -> waiting.Waiting:
    port: Any = SimpleNamespace(mail=SimpleNamespace(draining="", connected=True))
    place: Any = SimpleNamespace(phase=Phase.MEETING, leaving=False)
    return waiting.Waiting(port, place, lambda meet: None)


def test_what_is_waited_for_is_said_once_it_lasts(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    waits = member()
    waits.said()
    waits.waits_for("waiting for rank 1 to stop")
    for _ in range(8):
        clock.now += 0.5
        waits.look_around()
    assert caplog.messages == ["waiting for rank 1 to stop; for 2 s now"]


def test_without_a_word_from_the_coordinator_that_is_what_is_said(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    waits = member()
    clock.now += 60.0  # it trained meanwhile: that was no wait
    waits.said()
    clock.now += 2.0
    waits.look_around()
    assert caplog.messages == ["the coordinator has not answered yet; for 2 s now"]
    waits.waits_for("waiting for rank 1 to stop")
    clock.now += 0.5
    waits.look_around()
    assert caplog.messages[1:] == ["waiting for rank 1 to stop; for 0 s now"]
