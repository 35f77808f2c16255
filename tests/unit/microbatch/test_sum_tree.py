"""The tree over the microbatches of a step: each addition is a node of it, whoever has which microbatches."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._base.shares import range_of
from paceline._microbatch.sum_tree import (
    Node,
    closes,
    maximal_subtrees,
    merges,
    split_of,
    subtrees_by_rank,
)

counts = st.integers(1, 70)


def nodes_of(node: Node) -> set[Node]:
    """A node, and all nodes below it."""
    if node[1] - node[0] == 1:
        return {node}
    middle = split_of(node)
    return {node, *nodes_of((node[0], middle)), *nodes_of((middle, node[1]))}


def summed(nodes: list[Node], microbatches: int) -> list[Node]:
    """What waits after the sums that `merges` orders; fails if one of them is no node of the tree."""
    waiting: list[Node] = []
    for node, count in zip(nodes, merges(tuple(nodes), microbatches), strict=True):
        waiting.append(node)
        for _ in range(count):
            right, left = waiting.pop(), waiting.pop()
            assert left[1] == right[0]
            assert (left[0], right[1]) in nodes_of((0, microbatches))
            waiting.append((left[0], right[1]))
    return waiting


@given(microbatches=counts)
@settings(deadline=None)
def test_left_subtrees_have_power_of_two_sizes(microbatches: int) -> None:
    nodes = nodes_of((0, microbatches))
    assert len(nodes) == 2 * microbatches - 1
    for node in nodes:
        if node[1] - node[0] > 1:
            left, right = split_of(node) - node[0], node[1] - split_of(node)
            assert left & (left - 1) == 0
            assert right <= left


@given(microbatches=counts, data=st.data())
@settings(deadline=None)
def test_maximal_subtrees_are_the_largest_nodes_in_a_range(microbatches: int, data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, microbatches - 1))
    hi = data.draw(st.integers(lo + 1, microbatches))
    nodes = nodes_of((0, microbatches))
    inside = {node for node in nodes if lo <= node[0] and node[1] <= hi}
    greatest = sorted(n for n in inside if not any(o != n and o[0] <= n[0] and n[1] <= o[1] for o in inside))
    assert list(maximal_subtrees(lo, hi, microbatches)) == greatest
    assert len(greatest) <= max(1, 2 * ceil(log2(microbatches)))
    # The binary counter of a rank that computes these microbatches one by one waits for the same nodes.
    assert summed([(v, v + 1) for v in range(lo, hi)], microbatches) == greatest


@given(microbatches=counts, data=st.data())
@settings(deadline=None)
def test_subtrees_of_all_ranks_add_up_to_the_root(microbatches: int, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, microbatches))
    by_rank = subtrees_by_rank(world, microbatches)
    assert [range_of(rank, world, microbatches) for rank in range(world)] == [(of[0][0], of[-1][1]) for of in by_rank]
    assert summed([node for of in by_rank for node in of], microbatches) == [(0, microbatches)]


@given(microbatches=st.integers(1, 40), data=st.data())
@settings(deadline=None)
def test_closes_accepts_only_the_two_children_of_a_node(microbatches: int, data: st.DataObject) -> None:
    nodes = sorted(nodes_of((0, microbatches)))
    left = data.draw(st.sampled_from(nodes))
    right = data.draw(st.sampled_from(nodes))
    children = {((n[0], split_of(n)), (split_of(n), n[1])) for n in nodes if n[1] - n[0] > 1}
    assert closes(left, right, microbatches) == ((left, right) in children)


@pytest.mark.parametrize(
    ("world", "counts_of"), [(1, [1]), (2, [1, 1]), (3, [1, 2, 2]), (4, [1] * 4), (8, [1] * 8), (5, [1, 2, 1, 1, 1])]
)
def test_number_of_subtrees_per_rank_for_eight_microbatches(world: int, counts_of: list[int]) -> None:
    assert [len(nodes) for nodes in subtrees_by_rank(world, 8)] == counts_of
