"""Long copies go through the caches or past them, whichever has been faster lately.

A machine is the rate of copies by (the way that they go, the way that those of the operation before went).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from paceline.links.shm import copying
from paceline.links.shm.copying import Copier, Route
from paceline.links.staging import LONG_FRAME_BYTES, LONGEST_FRAME_BYTES, STREAMED_BYTES

FIRST, EVERY = 8, 256

Machine = Callable[[bool, bool], float]


def one_cache(past: bool, before: bool) -> float:
    """Cores that share it; what has just been streamed must be fetched from main memory."""
    return 14e9 if past else (6e9 if before else 27e9)


def two_caches(past: bool, before: bool) -> float:
    """Cores that share none; what has just been streamed lies in neither."""
    return 10e9 if past else (9e9 if before else 2.6e9)


def no_streams(past: bool, before: bool) -> float:
    """Nobody has told glibc a threshold."""
    return 12e9


def ride(route: Route, machine: Machine, operations: int) -> list[bool]:
    """Which of so many operations were streamed."""
    ways, before = [], route.streams
    for _ in range(operations):
        ways.append(route.streams)
        route.note(machine(route.streams, before))
        before = ways[-1]
    return ways


@pytest.mark.parametrize(("machine", "streams"), [(one_cache, False), (two_caches, True), (no_streams, False)])
def test_the_faster_way_is_found_and_kept(machine: Machine, streams: bool) -> None:
    ways = ride(Route(FIRST), machine, 20 * EVERY)
    assert ways[20:EVERY] == [streams] * (EVERY - 20)
    assert ways[20:].count(not streams) <= 2 * 20


def test_each_trial_is_two_operations_long() -> None:
    """The first finds what the other way has left in the caches, so it says nothing."""
    ways = ride(Route(FIRST), one_cache, 3 * EVERY)
    starts = [at for at, (a, b) in enumerate(pairwise([False, *ways])) if b and not a]
    assert len(starts) == 3
    assert all(ways[at : at + 3] == [True, True, False] for at in starts)


@pytest.mark.parametrize("first", [one_cache, two_caches])
def test_it_follows_a_machine_that_changes(first: Machine) -> None:
    route, second = Route(FIRST), two_caches if first is one_cache else one_cache
    for machine in (first, second, first, second):
        ride(route, machine, EVERY + 20)
        assert route.streams is (machine is two_caches)


@pytest.mark.parametrize("machine", [one_cache, two_caches])
def test_one_slow_operation_changes_nothing(machine: Machine) -> None:
    """Somebody else had the processor meanwhile."""
    route = Route(FIRST)
    ride(route, machine, 50)
    streams = route.streams
    route.note(machine(streams, streams) / 20)
    assert ride(route, machine, 100) == [streams] * 100


def test_a_trial_that_met_a_slow_moment_is_made_again() -> None:
    route = Route(FIRST)
    while not route.streams:
        route.note(two_caches(False, False))
    route.note(1e9)
    route.note(1e9)
    assert not route.streams
    ride(route, two_caches, 2 * EVERY)
    assert route.streams


@pytest.mark.parametrize("size", [1, STREAMED_BYTES - 1, STREAMED_BYTES, LONG_FRAME_BYTES, LONGEST_FRAME_BYTES])
def test_every_byte_is_copied_by_either_way(size: int) -> None:
    rng, copier = np.random.default_rng(size), Copier(LONG_FRAME_BYTES, FIRST)
    target, ways = np.zeros(size + 2, np.uint8), set()
    for operation in range(1, 13):  # a trial is among them
        source = rng.integers(1, 255, size, np.uint8)
        copier.copy(source.data, target[1:-1].data, operation)
        assert np.array_equal(target[1:-1], source)
        ways.add(copier.streams)
    assert (True in ways) == (STREAMED_BYTES <= size <= LONG_FRAME_BYTES)
    assert target[0] == target[-1] == 0


@pytest.mark.parametrize("most", [LONG_FRAME_BYTES, LONGEST_FRAME_BYTES])
def test_what_is_long_enough_to_stream_has_a_choice_up_to_a_length(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer ones always stream; and no piece is long enough to, nor is what is too short for a choice."""
    lengths: list[int] = []
    copyto = np.copyto

    def record(target: np.ndarray, source: np.ndarray) -> None:
        lengths.append(len(target))
        copyto(target, source)

    monkeypatch.setattr(copying.np, "copyto", record)
    data = bytearray(LONGEST_FRAME_BYTES)
    for size in (STREAMED_BYTES - 1, STREAMED_BYTES, LONG_FRAME_BYTES, LONGEST_FRAME_BYTES):
        lengths.clear()
        Copier(most, FIRST).copy(memoryview(data)[:size], memoryview(bytearray(size)), 1)
        assert sum(lengths) == size
        if STREAMED_BYTES <= size <= most:
            assert len(lengths) == 2
            assert max(lengths) < STREAMED_BYTES - 64
        else:
            assert lengths == [size]


def test_the_frames_of_an_operation_are_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[float] = []
    monkeypatch.setattr(Route, "note", lambda self, rate: noted.append(rate))
    clock = iter(range(100))
    monkeypatch.setattr(copying, "thread_time", lambda: float(next(clock)))  # each copy takes a second
    copier, data = Copier(LONG_FRAME_BYTES, FIRST), memoryview(bytearray(LONG_FRAME_BYTES))
    for operation in (1, 1, 1, 2, 4):
        copier.copy(data, data, operation)
    assert noted == [LONG_FRAME_BYTES, LONG_FRAME_BYTES]


def test_a_clock_that_stands_still_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "thread_time", lambda: 1.0)
    copier, data = Copier(LONG_FRAME_BYTES, FIRST), memoryview(bytearray(LONG_FRAME_BYTES))
    for operation in range(1, 2 * FIRST):
        copier.copy(data, data, operation)
        assert not copier.streams
