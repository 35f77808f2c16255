"""Divides the microbatches of a step among ranks, and chooses the sums that each rank gives to the total. Pure.

In an undisturbed step rank r computes the microbatches [r V // W, (r + 1) V // W), or as many as its share has. If an
attempt at the step was undone, ranks may still hold sums from it: nodes of the tree (`sum_tree`). Then these are kept,
and only the missing microbatches are computed, spread evenly over the ranks (docs/decisions/18). All ranks compute the
same plan from the same table of what each of them holds.

Letters: V microbatches, the leaves of the tree, W world size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline._base.shares import Shares, ranges_of
from paceline._base.sum_order import Node
from paceline._microbatch.sum_tree import joined, maximal_subtrees, subtrees_by_rank

_REFUSES = -1
"""In all places of a row: this rank refuses any sums that were kept."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's share of the microbatches of a step.

    Attributes:
        numbers: the microbatches that it computes, from left to right; at least one.
        nodes: for each rank, the nodes whose sums it gives, from left to right. Together they are the whole tree.
        kept: the nodes that this rank has from an undone attempt.
        repeats: True if nothing is left for this rank to compute. It computes one all the same, because the
            script's loop leads to the collectives, and drops its gradients.
    """

    leaves: int
    rank: int
    numbers: tuple[int, ...]
    nodes: tuple[tuple[Node, ...], ...]
    kept: tuple[Node, ...] = ()
    repeats: bool = False

    @property
    def root(self) -> int:
        """The rank whose sums contain leaf 0."""
        return next(rank for rank, nodes in enumerate(self.nodes) if nodes and nodes[0][0] == 0)


def usual_plan(rank: int, world: int, leaves: int, shares: Shares | None = None) -> RankPlan:
    """Returns the plan of a rank for an undisturbed step."""
    return plan_ranks(((),) * world, leaves, shares)[rank]


@lru_cache(maxsize=64)
def plan_ranks(held: tuple[tuple[Node, ...], ...], leaves: int, shares: Shares | None = None) -> tuple[RankPlan, ...]:
    """Returns the plan of each rank, from the nodes of which each rank has sums.

    Where nodes overlap, the greatest is kept, and of equal ones the lowest rank's. The missing ones are divided in
    one range for each rank, whose lengths differ by 1 at most if shares are equal.
    """
    world = len(held)
    if leaves < world:
        raise ValueError(f"{leaves} microbatches for {world} ranks: each computes at least one")
    taken: set[int] = set()
    kept: list[list[Node]] = [[] for _ in held]
    for node, rank in sorted(
        ((node, rank) for rank, nodes in enumerate(held) for node in nodes),
        key=lambda found: (found[0][0] - found[0][1], found),
    ):
        if taken.isdisjoint(range(*node)):
            taken.update(range(*node))
            kept[rank].append(node)
    missing = [number for number in range(leaves) if number not in taken]
    own = [missing[lo:hi] for lo, hi in ranges_of(world, len(missing), shares)]
    nodes = tuple(
        joined([*kept[rank], *((number, number + 1) for number in own[rank])], leaves) for rank in range(world)
    )
    if not taken and shares is None:
        nodes = subtrees_by_rank(world, leaves)  # the same, and the object that others compare with
    return tuple(
        RankPlan(leaves, rank, tuple(own[rank]) or (first,), nodes, tuple(sorted(kept[rank])), repeats=not own[rank])
        for rank, (first, _) in enumerate(ranges_of(world, leaves, shares))
    )


@lru_cache(maxsize=64)
def sums_at_once(plan: RankPlan) -> int:
    """Returns the greatest number of sums that a rank has at one time while it computes its microbatches."""
    ranges = [(number, number + 1) for number in plan.numbers]
    return max(len(joined([*plan.kept, *ranges[:count]], plan.leaves)) for count in range(1, len(ranges) + 1))


def row_of_held(nodes: Iterable[Node] | None, leaves: int) -> NDArray[np.int64]:
    """Returns nodes as one row of numbers, shape [V]: at place lo the end of a node [lo, hi), elsewhere 0.

    None becomes a row of -1: no rank may use sums that were kept.
    """
    row = np.full(leaves, _REFUSES if nodes is None else 0, np.int64)
    for lo, hi in nodes or ():
        row[lo] = hi
    return row


def held_of_row(row: NDArray[np.int64]) -> tuple[Node, ...] | None:
    """Returns the nodes of a row of another rank's; None if it refuses any sums. ValueError if they are no nodes."""
    if (row == _REFUSES).all():
        return None
    nodes, end = [], 0
    for lo, hi in enumerate(row.tolist()):
        if not hi:
            continue
        if not end <= lo < hi <= len(row) or maximal_subtrees(lo, hi, len(row)) != ((lo, hi),):
            raise ValueError(f"holds the microbatches {lo} to {hi - 1}, which are not a node of {len(row)}, or overlap")
        nodes.append((lo, end := hi))
    return tuple(nodes)
