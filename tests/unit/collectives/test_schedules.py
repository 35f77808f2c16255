"""Schedules as they are written down; what they compute is shown in test_program.py."""

from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
from unit.collectives.simulate import Rank, add, run

from paceline._collectives import schedules
from paceline._collectives.program import Area, all_reduce_program
from paceline._collectives.rows import Action, Row, chunk_bounds, format_schedule, ring_neighbours

WORLDS = range(1, 18)
NODES = (0, 0, 1, 0, 1, 2, 2, 0, 1, 2, 2, 2, 1, 3, 3, 0, 3)
"""Of each rank, for schedules that go by them."""


def test_ring_neighbors_wrap_around() -> None:
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
def test_chunk_bounds_match_the_reference(n: int, parts: int, bounds: Any) -> None:
    assert chunk_bounds(n, parts) == bounds


def test_chunks_cover_all_elements_once_and_differ_by_at_most_one() -> None:
    for n in range(60):
        for parts in WORLDS:
            bounds = chunk_bounds(n, parts)
            assert [i for lo, hi in bounds for i in range(lo, hi)] == list(range(n))
            sizes = {hi - lo for lo, hi in bounds}
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world", range(2, 18))
def test_ring_all_reduce_sums_each_chunk_in_ring_order(world: int) -> None:
    ranks = [Rank(all_reduce_program("ring", r, world, world, 1), [r] * world, [None] * world) for r in range(world)]
    for rank in ranks:
        rank.memory[Area.BASE] = [f"{rank.memory[Area.BASE][0]}"] * world
    run(ranks)
    for chunk in range(world):
        order = [str((chunk + i) % world) for i in range(world)]
        *_, total = accumulate(order, add)
        assert all(rank.memory[Area.OUT][chunk] == ("/", total) for rank in ranks)


def test_ring_all_reduce_rows_match_the_reference() -> None:
    rows = schedules.ring_all_reduce(1, 4)
    assert [(row.send_chunk, row.recv_chunk) for row in rows] == [(1, 0), (0, 3), (3, 2), (2, 1), (1, 0), (0, 3)]
    assert {(row.recv_from, row.send_to) for row in rows} == {(0, 2)}
    assert [row.action for row in rows] == [Action.REDUCE, Action.REDUCE, Action.FINALIZE, *[Action.STORE] * 3]


@pytest.mark.parametrize("world", WORLDS)
def test_every_send_row_has_a_matching_receive_row(world: int) -> None:
    """Per step and pair, in order: what is sent is what is awaited, for every schedule and root."""
    for collective, named in schedules.SCHEDULES.items():
        for name in named:
            for root in {0, world - 1} if collective in schedules.ROOTED else {0}:
                sent, awaited = Counter(), Counter()
                for rank in range(world):
                    for row in schedules.rows_of(collective, name, rank, world, root, nodes=NODES[:world]):
                        if row.send_to is not None:
                            chunk = world + rank if collective == "all_to_all" else row.send_chunk
                            sent.update((row.step, rank, row.send_to, chunk + i) for i in range(row.span))
                        if row.recv_from is not None:
                            key = (row.step, row.recv_from, rank)
                            if collective == "broadcast" or name in ("star", "tree") or "doubling" in name:
                                key = (0, *key[1:])  # the two sides count steps by their own
                            awaited.update((*key, row.recv_chunk + i) for i in range(row.span))
                if collective == "broadcast" or name in ("star", "tree") or "doubling" in name:
                    sent = Counter({(0, *key[1:]): 0 for key in sent}) + Counter(
                        (0, *key[1:]) for key in sent.elements()
                    )
                if collective == "barrier":
                    sent, awaited = (Counter(key[1:] for key in keys.elements()) for keys in (sent, awaited))
                assert sent == awaited, f"{collective} by {name}"


def test_schedules_take_the_expected_number_of_steps() -> None:
    def steps(rows: list[Row]) -> int:
        return len({row.step for row in rows})

    for world in (2, 4, 8, 16):
        log = world.bit_length() - 1
        assert steps(schedules.star_all_reduce(0, world)) == 2
        assert steps(schedules.direct_all_reduce(1, world)) == 2
        assert steps(schedules.ring_all_reduce(1, world)) == 2 * (world - 1)
        assert steps(schedules.doubling_all_reduce(1, world)) == log
        assert steps(schedules.halving_doubling_all_reduce(1, world)) == 2 * log
        assert steps(schedules.bruck_all_gather(1, world)) == log
        assert steps(schedules.dissemination_barrier(1, world)) == log


def test_hierarchical_traffic_of_a_node_equals_that_of_a_ring_of_nodes() -> None:
    """2(H-1)/H of the array from each of H nodes, however many ranks they have; each of L rings carries a part."""
    for per_node in ([2, 2], [2, 2, 2, 2], [3, 1, 2], [1, 4], [4]):
        nodes = tuple(node for node, count in enumerate(per_node) for _ in range(count))
        chunks = schedules.hierarchical_chunks(len(nodes), nodes)
        assert chunks == len(per_node) * min(per_node)
        left = Counter()
        for rank, node in enumerate(nodes):
            for row in schedules.hierarchical_all_reduce(rank, len(nodes), nodes):
                if row.send_to is not None and nodes[row.send_to] != node:
                    left[node] += row.span
        count = len(per_node)
        assert left == Counter({node: 2 * (count - 1) * min(per_node) for node in range(count) if count > 1})


def test_tree_matches_the_reference() -> None:
    assert schedules.tree_children(1, 4, 1) == [2, 3]
    assert schedules.tree_children(2, 4, 1) == [0]
    assert [schedules.tree_children(r, 6, 2) for r in (2, 3, 4)] == [[3, 4], [5, 0], [1]]
    for world in WORLDS:
        for rank in range(world):
            depth, at = 0, rank
            while (parent := schedules.tree_parent(at, world, 0)) is not None:
                depth, at = depth + 1, parent
            assert depth <= world.bit_length() - 1, "floor(log2 W)"


def test_a_schedule_can_be_printed() -> None:
    assert format_schedule(schedules.ring_all_reduce(0, 2)).splitlines() == [
        "step  send           receive",
        "   0  0 to 1         1 from 1: finalize",
        "   1  1 to 1         0 from 1: store",
    ]
    assert "-" in format_schedule(schedules.star_all_reduce(1, 2))
    assert "4-7 to 4" in format_schedule(schedules.halving_doubling_all_reduce(0, 8))
