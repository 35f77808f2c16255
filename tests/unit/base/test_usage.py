"""A worker knows how much of the machine it uses."""

from __future__ import annotations

import sys

import pytest

from paceline._base.usage import ProcessUsage


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_processor_time_is_measured_in_cores() -> None:
    clock, processor = Clock(), Clock()
    usage = ProcessUsage(clock, processor)
    clock.now, processor.now = 2.0, 3.0
    assert usage.cores() == 1.5
    clock.now = 4.0
    assert usage.cores() == 0.0, "only the time since the last value counts"


def test_calls_in_quick_succession_get_the_last_value() -> None:
    clock, processor = Clock(), Clock()
    usage = ProcessUsage(clock, processor)
    clock.now, processor.now = 1.0, 0.5
    assert usage.cores() == 0.5
    clock.now, processor.now = 1.001, 0.51
    assert usage.cores() == 0.5
    clock.now, processor.now = 2.0, 1.5
    assert usage.cores() == 1.0, "nothing is left out"


def test_real_clocks_are_used_unless_told_otherwise() -> None:
    assert ProcessUsage().cores() >= 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_memory_grows_with_an_allocation() -> None:
    before = ProcessUsage.memory()
    held = b"x" * (64 << 20)
    assert ProcessUsage.memory() - before > len(held) // 2
