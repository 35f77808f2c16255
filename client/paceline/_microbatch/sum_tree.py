"""The fixed tree in which the parts of a step are summed, whatever ranks compute them. Pure.

The tree has the parts 0 to V-1 as leaves, and its nodes are ranges [lo, hi) of parts. A node of more than one part
splits after the greatest power of two below its size, so all left children are whole powers of two. A node's sum is the
sum of its left child plus that of its right one.

A rank has contiguous parts, [r V // W, (r + 1) V // W), unless a step is repaired (`rank_plan`). It adds up the
*maximal subtrees* of this range: the greatest nodes that lie within it, one after the other. All ranks' maximal
subtrees together cover the tree from left to right, so any rank that has their sums can finish it: each addition is a
node of the same tree, and gives the same bits.

Letters: V parts, v one of them, W world size, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

Node: TypeAlias = tuple[int, int]
"""The parts lo to hi - 1, as (lo, hi)."""


def leaves_of(rank: int, world: int, parts: int) -> Node:
    """Returns the parts of a rank; at least one if there are as many parts as ranks."""
    return rank * parts // world, (rank + 1) * parts // world


def split_of(node: Node) -> int:
    """Returns the first part of the right child of a node of at least two parts."""
    lo, hi = node
    return lo + (1 << (hi - lo - 1).bit_length() - 1)


def maximal_subtrees(lo: int, hi: int, parts: int) -> tuple[Node, ...]:
    """Returns the greatest nodes within [lo, hi), from left to right; at most 2 log2 V of them."""
    return tuple(_within(lo, hi, (0, parts)))


def _within(lo: int, hi: int, node: Node) -> Iterator[Node]:
    if hi <= node[0] or node[1] <= lo:
        return
    if lo <= node[0] and node[1] <= hi:
        yield node
        return
    middle = split_of(node)
    yield from _within(lo, hi, (node[0], middle))
    yield from _within(lo, hi, (middle, node[1]))


@lru_cache(maxsize=256)
def subtrees_by_rank(world: int, parts: int) -> tuple[tuple[Node, ...], ...]:
    """Returns the maximal subtrees of each rank."""
    return tuple(maximal_subtrees(*leaves_of(rank, world, parts), parts) for rank in range(world))


def closes(left: Node, right: Node, parts: int) -> bool:
    """Returns True if two nodes, the second right of the first, are the children of one node."""
    node = (0, parts)
    while node[1] - node[0] > 1:
        middle = split_of(node)
        if node == (left[0], right[1]):
            return middle == left[1] == right[0]
        if right[1] <= middle:
            node = (node[0], middle)
        elif left[0] >= middle:
            node = (middle, node[1])
        else:
            return False
    return False


def joined(nodes: Iterable[Node], parts: int) -> tuple[Node, ...]:
    """Returns what is left of disjoint nodes if siblings are summed wherever both are there, from left to right."""
    waiting: list[Node] = []
    for lo, hi in sorted(nodes):
        while waiting and closes(waiting[-1], (lo, hi), parts):
            lo, _ = waiting.pop()
        waiting.append((lo, hi))
    return tuple(waiting)


@lru_cache(maxsize=256)
def merges(nodes: Sequence[Node], parts: int) -> tuple[int, ...]:
    """Returns, for adjacent nodes from left to right, how many sums follow each of them.

    This is a binary counter: what waits is a stack, and each sum takes its two uppermost elements.
    """
    waiting: list[Node] = []
    counts = []
    for node in nodes:
        waiting.append(node)
        count = 0
        while len(waiting) > 1 and closes(waiting[-2], waiting[-1], parts):
            right, left = waiting.pop(), waiting.pop()
            waiting.append((left[0], right[1]))
            count += 1
        counts.append(count)
    return tuple(counts)
