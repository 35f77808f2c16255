"""Schedules are right for every world: proved by carrying them out on symbols instead of numbers."""

from collections import defaultdict, deque
from typing import Any

import pytest

from paceline.collectives import schedules
from paceline.collectives.schedules import Action, Row, chunk_bounds, format_schedule, ring_neighbours

WORLDS = range(1, 18)


def test_ring_neighbours_wrap_around() -> None:
    assert ring_neighbours(0, 4) == (3, 1)
    assert ring_neighbours(3, 4) == (2, 0)
    assert ring_neighbours(2, 4) == (1, 3)
    assert ring_neighbours(0, 1) == (0, 0)


@pytest.mark.parametrize(
    ("n", "parts", "bounds"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (7, 4, [(0, 1), (1, 3), (3, 5), (5, 7)]),
        (3, 4, [(0, 0), (0, 1), (1, 2), (2, 3)]),
        (0, 3, [(0, 0), (0, 0), (0, 0)]),
    ],
)
def test_chunks_as_the_reference_cuts_them(n: int, parts: int, bounds: Any) -> None:
    assert chunk_bounds(n, parts) == bounds


def test_chunks_cover_once_and_differ_by_one_at_most() -> None:
    for n in range(60):
        for parts in WORLDS:
            bounds = chunk_bounds(n, parts)
            assert [i for lo, hi in bounds for i in range(lo, hi)] == list(range(n))
            sizes = {hi - lo for lo, hi in bounds}
            assert max(sizes) - min(sizes) <= 1


def carry_out(make: Any, world: int, chunks: int) -> Any:
    """Runs all ranks' rows; a value is the list of ranks whose arrays were summed, in that order, then '/'."""
    rows = [deque(make(rank)) for rank in range(world)]
    held = [[[rank] for _ in range(chunks)] for rank in range(world)]
    wires = defaultdict(deque)
    sent = [set() for _ in range(world)]
    moved = True
    while moved:
        moved = False
        for rank in range(world):
            if not rows[rank]:
                continue
            row: Row = rows[rank][0]
            if row.send_to is not None and row.step not in sent[rank]:
                wires[rank, row.send_to].append((row.send_chunk, list(held[rank][row.send_chunk])))
                sent[rank].add(row.step)
                moved = True
            if row.recv_from is not None:
                if not wires[row.recv_from, rank]:
                    continue
                chunk, value = wires[row.recv_from, rank].popleft()
                assert chunk == row.recv_chunk
                if row.action is not Action.STORE:
                    assert "/" not in value
                    value = value + held[rank][chunk]
                if row.action is Action.FINALIZE:
                    value = [*value, "/"]
                held[rank][chunk] = value
            rows[rank].popleft()
            sent[rank].clear()
            moved = True
    assert not any(rows), "the schedule comes to a stop"
    assert not any(wires.values()), "something was sent that nobody receives"
    return held


@pytest.mark.parametrize("world", WORLDS)
def test_ring_all_reduce(world: int) -> None:
    held = carry_out(lambda rank: schedules.ring_all_reduce(rank, world), world, world)
    for chunk in range(world):
        order = [(chunk + i) % world for i in range(world)]
        expected = [*order, "/"] if world > 1 else [0]
        assert all(held[rank][chunk] == expected for rank in range(world))


def test_ring_sends_each_chunk_as_the_reference_does() -> None:
    rows = schedules.ring_all_reduce(1, 4)
    assert [(row.send_chunk, row.recv_chunk) for row in rows] == [(1, 0), (0, 3), (3, 2), (2, 1), (1, 0), (0, 3)]
    assert {(row.recv_from, row.send_to) for row in rows} == {(0, 2)}
    assert [row.action for row in rows] == [Action.REDUCE, Action.REDUCE, Action.FINALIZE, *[Action.STORE] * 3]


@pytest.mark.parametrize("world", WORLDS)
def test_star_all_reduce(world: int) -> None:
    held = carry_out(lambda rank: schedules.star_all_reduce(rank, world), world, 1)
    for rank in range(world):
        assert sorted(held[rank][0], key=str) == sorted([*range(world), *(["/"] if world > 1 else [])], key=str)
        assert held[rank] == held[0], "all ranks hold the same expression, so the same bits"


@pytest.mark.parametrize("world", WORLDS)
def test_tree_broadcast_from_every_root(world: int) -> None:
    for root in range(world):
        held = carry_out(lambda rank, root=root: schedules.tree_broadcast(rank, world, root), world, 1)
        assert all(held[rank] == [[root]] for rank in range(world))


def test_tree_is_the_one_of_the_reference() -> None:
    assert schedules.tree_children(1, 4, 1) == [2, 3]
    assert schedules.tree_children(2, 4, 1) == [0]
    assert [schedules.tree_children(r, 6, 2) for r in (2, 3, 4)] == [[3, 4], [5, 0], [1]]
    for world in WORLDS:
        for rank in range(world):
            depth, at = 0, rank
            while (parent := schedules.tree_parent(at, world, 0)) is not None:
                depth, at = depth + 1, parent
            assert depth <= world.bit_length() - 1, "floor(log2 W)"


@pytest.mark.parametrize("world", WORLDS)
def test_barrier_lets_nobody_go_before_all_have_come(world: int) -> None:
    heard = [{rank} for rank in range(world)]
    steps = [schedules.dissemination_barrier(rank, world) for rank in range(world)]
    for step in range(len(steps[0])):
        before = [set(known) for known in heard]
        for rank in range(world):
            source = steps[rank][step].recv_from
            assert steps[source][step].send_to == rank
            heard[rank] |= before[source]
    assert all(known == set(range(world)) for known in heard)
    assert len(steps[0]) == (world - 1).bit_length(), "ceil(log2 W)"


def test_a_schedule_can_be_printed() -> None:
    assert format_schedule(schedules.ring_all_reduce(0, 2)).splitlines() == [
        "step  send          receive",
        "   0  0 to 1        1 from 1: finalize",
        "   1  1 to 1        0 from 1: store",
    ]
    assert "-" in format_schedule(schedules.star_all_reduce(1, 2))
