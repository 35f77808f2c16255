"""The tree over the parts of a step: each addition is a node of it, whoever has which parts."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._microbatch.sum_tree import (
    Node,
    closes,
    leaves_of,
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


def summed(nodes: list[Node], parts: int) -> list[Node]:
    """What waits after the sums that `merges` orders; fails if one of them is no node of the tree."""
    waiting: list[Node] = []
    for node, count in zip(nodes, merges(tuple(nodes), parts), strict=True):
        waiting.append(node)
        for _ in range(count):
            right, left = waiting.pop(), waiting.pop()
            assert left[1] == right[0]
            assert (left[0], right[1]) in nodes_of((0, parts))
            waiting.append((left[0], right[1]))
    return waiting


@given(parts=counts)
@settings(deadline=None)
def test_left_children_are_whole_powers_of_two(parts: int) -> None:
    nodes = nodes_of((0, parts))
    assert len(nodes) == 2 * parts - 1
    for node in nodes:
        if node[1] - node[0] > 1:
            left, right = split_of(node) - node[0], node[1] - split_of(node)
            assert left & (left - 1) == 0
            assert right <= left


@given(parts=counts, data=st.data())
@settings(deadline=None)
def test_subtrees_are_the_greatest_nodes_of_a_range(parts: int, data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, parts - 1))
    hi = data.draw(st.integers(lo + 1, parts))
    nodes = nodes_of((0, parts))
    inside = {node for node in nodes if lo <= node[0] and node[1] <= hi}
    greatest = sorted(n for n in inside if not any(o != n and o[0] <= n[0] and n[1] <= o[1] for o in inside))
    assert list(maximal_subtrees(lo, hi, parts)) == greatest
    assert len(greatest) <= max(1, 2 * ceil(log2(parts)))
    # The binary counter of a rank that computes these parts one by one waits for the same nodes.
    assert summed([(v, v + 1) for v in range(lo, hi)], parts) == greatest


@given(parts=counts, data=st.data())
@settings(deadline=None)
def test_all_ranks_together_sum_up_the_tree(parts: int, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, parts))
    by_rank = subtrees_by_rank(world, parts)
    assert [leaves_of(rank, world, parts) for rank in range(world)] == [(of[0][0], of[-1][1]) for of in by_rank]
    assert summed([node for of in by_rank for node in of], parts) == [(0, parts)]


@given(parts=st.integers(1, 40), data=st.data())
@settings(deadline=None)
def test_only_the_two_children_of_a_node_are_summed(parts: int, data: st.DataObject) -> None:
    nodes = sorted(nodes_of((0, parts)))
    left = data.draw(st.sampled_from(nodes))
    right = data.draw(st.sampled_from(nodes))
    children = {((n[0], split_of(n)), (split_of(n), n[1])) for n in nodes if n[1] - n[0] > 1}
    assert closes(left, right, parts) == ((left, right) in children)


@pytest.mark.parametrize(
    ("world", "counts_of"), [(1, [1]), (2, [1, 1]), (3, [1, 2, 2]), (4, [1] * 4), (8, [1] * 8), (5, [1, 2, 1, 1, 1])]
)
def test_how_many_arrays_each_rank_sends_of_eight_parts(world: int, counts_of: list[int]) -> None:
    assert [len(nodes) for nodes in subtrees_by_rank(world, 8)] == counts_of
