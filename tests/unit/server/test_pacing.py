"""How fast one caller may go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.limits import Pacer, Pacers


def test_a_burst_costs_nothing_and_what_follows_goes_at_the_rate() -> None:
    pacer = Pacer(rate=10.0, burst=5.0, now=0.0)
    assert [pacer.delay(0.0) for _ in range(5)] == [0.0] * 5
    assert [pacer.delay(0.0) for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert pacer.delay(100.0) == 0.0


@given(st.floats(0.5, 1000.0), st.integers(1, 100), st.lists(st.floats(0.0, 0.1), max_size=200))
def test_nobody_is_served_faster_than_burst_and_rate(rate: float, burst: int, pauses: list[float]) -> None:
    pacer, now, served = Pacer(rate, burst, 0.0), 0.0, []
    for pause in pauses:
        now += pause
        served.append(now + pacer.delay(now))
    for n, at in enumerate(served):
        assert n + 1 <= burst + rate * at + 1e-6
    assert served == sorted(served)


def test_one_caller_is_not_slowed_by_another() -> None:
    pacers = Pacers(rate=1.0, burst=2.0, most=10)
    assert [pacers.delay("flood", 0.0) > 0 for _ in range(4)] == [False, False, True, True]
    assert pacers.delay("quiet", 0.0) == 0.0


def test_callers_that_come_and_go_take_no_memory() -> None:
    pacers = Pacers(rate=1.0, burst=2.0, most=10)
    for caller in range(1000):
        pacers.delay(caller, 0.0)
    assert len(pacers) == 10
