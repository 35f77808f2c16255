"""No wait of a user's thread sleeps for longer than a moment at a time, so that no signal is lost for longer."""

from __future__ import annotations

import queue
import threading
from time import monotonic
from typing import Any
from unittest import mock

import pytest

from paceline._wait import SLICE, wait_in_slices
from paceline.links.base import LinkTimeout
from paceline.links.fault import Fault
from paceline.links.grpc_queues import Inbox
from paceline.work import Work


def test_it_ends_when_it_comes_or_when_the_time_is_up() -> None:
    asked: list[float] = []

    def third(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) == 3

    assert wait_in_slices(third, None)
    assert asked == [SLICE] * 3
    assert not wait_in_slices(lambda seconds: False, 0.0)
    assert not wait_in_slices(lambda seconds: False, -1.0)
    start = monotonic()
    assert not wait_in_slices(threading.Event().wait, 0.05)
    assert 0.05 <= monotonic() - start < SLICE


def test_a_longer_time_is_kept() -> None:
    start = monotonic()
    assert not wait_in_slices(threading.Event().wait, SLICE + 0.1)
    assert SLICE + 0.1 <= monotonic() - start < 2 * SLICE


def test_a_link_and_an_operation_are_waited_for_in_slices() -> None:
    slept: list[Any] = []

    class Items(queue.SimpleQueue):  # type: ignore[type-arg]
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            slept.append(timeout)
            raise queue.Empty

    inbox = Inbox(mock.Mock())
    inbox._items = Items()
    with pytest.raises(LinkTimeout):
        inbox.get(monotonic() + 0.01, Fault(1, 0, verdict_timeout=0.0))
    work: Work[int] = Work(1, lambda: 7, lambda operation, error: None)
    waits = iter([False, True])
    with mock.patch.object(work._over, "wait", side_effect=lambda seconds: slept.append(seconds) or next(waits)):
        work._result = 7
        assert work.wait() == 7
    assert slept
    assert all(0 <= seconds <= SLICE for seconds in slept)
