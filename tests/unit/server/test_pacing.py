"""How fast one caller may go, whose place is lost, and when a line of log is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.limits import Pacer, Pacers, Places
from pacelinepb.remarks import Remarks


def test_a_burst_is_not_delayed_and_later_calls_follow_the_rate() -> None:
    pacer = Pacer(rate=10.0, burst=5.0, now=0.0)
    assert [pacer.delay(0.0) for _ in range(5)] == [0.0] * 5
    assert [pacer.delay(0.0) for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert pacer.delay(100.0) == 0.0


@given(st.floats(0.5, 1000.0), st.integers(1, 100), st.lists(st.floats(0.0, 0.1), max_size=200))
def test_a_caller_is_never_served_faster_than_burst_and_rate(rate: float, burst: int, pauses: list[float]) -> None:
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


def test_the_number_of_tracked_callers_is_bounded() -> None:
    pacers = Pacers(rate=1.0, burst=2.0, most=10)
    for caller in range(1000):
        pacers.delay(caller, 0.0)
    assert len(pacers) == 10


def test_a_refused_message_adds_no_delay() -> None:
    pacer = Pacer(rate=1.0, burst=1.0, now=0.0)
    assert pacer.delay(0.0, most=1.5) == 0.0
    assert pacer.delay(0.0, most=1.5) == 1.0
    assert [pacer.delay(0.0, most=1.5) for _ in range(100)] == [2.0] * 100
    assert pacer.delay(1.0, most=1.5) == 1.0


def test_the_caller_with_the_most_places_loses_its_oldest() -> None:
    places: Places[str] = Places(3)
    assert [places.take("flood", each) for each in ("a", "b")] == [None, None]
    assert places.take("quiet", "c") is None
    assert [places.take("flood", each) for each in ("d", "e", "f")] == ["a", "b", "d"]
    assert places.take("late", "g") == "e"
    assert places.take("later", "h") == "f", "all have one, so whoever came first has to go"
    for free in ("h", "h", "never there"):
        places.free(free)
    assert places.used == 2
    assert places.take("quiet", "i") is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=100))
def test_a_new_caller_gets_a_place_from_the_caller_with_the_most(moves: list[tuple[int, bool]]) -> None:
    places: Places[int] = Places(5)
    held: dict[int, int] = {}
    for number, (who, goes) in enumerate(moves):
        if goes and held:
            gone = min(held)
            places.free(gone)
            del held[gone]
            continue
        lost = places.take(who, number)
        held[number] = who
        owners = list(held.values())
        assert (lost is None) == (len(held) <= 5)
        if lost is not None:
            assert owners.count(held[lost]) == max(owners.count(each) for each in owners)
            assert lost == min(each for each in held if held[each] == held[lost])
            del held[lost]
        assert places.used == len(held)


def test_a_remark_is_logged_at_once_and_then_once_per_period() -> None:
    remarks = Remarks(10.0)
    assert [remarks.count("a", now) for now in (0.0, 0.0, 9.0)] == [1, 0, 0]
    assert remarks.count("b", 9.0) == 1
    assert [remarks.count("a", now) for now in (10.0, 19.0, 40.0)] == [3, 0, 2]
