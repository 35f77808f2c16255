"""How long a waiter stays awake."""

from __future__ import annotations

import os
from time import monotonic, process_time

import pytest

from paceline._links.shm.bell import Bell, SpinPolicy, awake_for


@pytest.mark.parametrize(
    ("neighbours", "cores", "shares"), [(1, 2, False), (2, 2, True), (7, 8, False), (3, None, True)]
)
def test_waiters_that_share_a_core_spin_for_less_time(
    neighbours: int, cores: int | None, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert (awake_for(neighbours) < awake_for(0)) == shares


def test_a_waiter_falls_asleep_and_is_woken_by_a_count() -> None:
    bell = Bell(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), 1e-4)
    try:
        before, start = process_time(), monotonic()
        assert bell.take(start + 0.1) == 0
        assert monotonic() - start >= 0.09
        assert process_time() - before < 0.05, "it slept"
        os.eventfd_write(bell.fd, 3)
        assert bell.take(monotonic() + 5.0) == 3
    finally:
        bell.close()


def test_spinning_stops_after_long_waits_and_resumes_after_short_ones() -> None:
    spinning = SpinPolicy(1e-4)
    assert spinning.should_spin
    spinning.note(100.0)
    for _ in range(10):
        spinning.note(2e-4)
    assert not spinning.should_spin
    for _ in range(10):
        spinning.note(1e-5)
    assert spinning.should_spin


def test_read_returns_the_count_without_waiting() -> None:
    bell = Bell(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), 0.0)
    assert bell.read() == 0
    os.eventfd_write(bell.fd, 5)
    bell.wake()
    assert bell.read() == 5
    assert bell.read() == 0
    bell.close()
    assert bell.read() == 0
