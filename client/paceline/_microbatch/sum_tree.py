"""The fixed tree in which the microbatches of a step are summed, whatever ranks compute them. Pure.

The tree has the microbatches 0 to V-1 as leaves, and its nodes are ranges [lo, hi) of them. A node of more than one
leaf splits after the greatest power of two below its size, so all left children are whole powers of two. A node's sum
is its left child's sum plus its right child's.

A rank has contiguous leaves, [r V // W, (r + 1) V // W), unless shares are unequal or a step is repaired (`rank_plan`).
It adds up the *maximal subtrees* of this range: the greatest nodes that lie within it, one after the other. All ranks'
maximal subtrees together cover the tree from left to right, so any rank that has their sums can finish it: each
addition is a node of the same tree, and gives the same bits.

Letters: V leaves, v one of them, W world size, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from paceline._base.shares import range_of
from paceline._base.sum_order import Node


def split_of(node: Node) -> int:
    """Returns the first leaf of the right child of a node of at least two leaves."""
    lo, hi = node
    return lo + (1 << (hi - lo - 1).bit_length() - 1)


def maximal_subtrees(lo: int, hi: int, leaves: int) -> tuple[Node, ...]:
    """Returns the greatest nodes within [lo, hi), from left to right; at most 2 log2 V of them."""
    return tuple(_within(lo, hi, (0, leaves)))


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
def subtrees_by_rank(world: int, leaves: int) -> tuple[tuple[Node, ...], ...]:
    """Returns the maximal subtrees of each rank."""
    return tuple(maximal_subtrees(*range_of(rank, world, leaves), leaves) for rank in range(world))


def closes(left: Node, right: Node, leaves: int) -> bool:
    """Returns True if two nodes, the second right of the first, are the children of one node."""
    node = (0, leaves)
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


def joined(nodes: Iterable[Node], leaves: int) -> tuple[Node, ...]:
    """Returns what is left of disjoint nodes if siblings are summed wherever both are there, from left to right."""
    waiting: list[Node] = []
    for lo, hi in sorted(nodes):
        while waiting and closes(waiting[-1], (lo, hi), leaves):
            lo, _ = waiting.pop()
        waiting.append((lo, hi))
    return tuple(waiting)


@lru_cache(maxsize=256)
def merges(nodes: Sequence[Node], leaves: int) -> tuple[int, ...]:
    """Returns, for adjacent nodes from left to right, how many sums follow each of them.

    This is a binary counter: what waits is a stack, and each sum takes its two uppermost elements.
    """
    waiting: list[Node] = []
    counts = []
    for node in nodes:
        waiting.append(node)
        count = 0
        while len(waiting) > 1 and closes(waiting[-2], waiting[-1], leaves):
            right, left = waiting.pop(), waiting.pop()
            waiting.append((left[0], right[1]))
            count += 1
        counts.append(count)
    return tuple(counts)
