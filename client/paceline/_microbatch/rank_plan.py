"""Divides the parts of a step among ranks, and chooses the sums of parts that each rank gives to the total. Pure.

In an undisturbed step rank r computes the parts [r V // W, (r + 1) V // W). If an attempt at the step was undone,
ranks may still hold sums of parts from it: nodes of the tree (`sum_tree`). Then these are kept, and only the missing
parts are computed, spread evenly over the ranks (docs/decisions/064). All ranks compute the same plan from the same
table of what each of them holds.

Letters: V parts, W world size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline._microbatch.sum_tree import Node, joined, leaves_of, maximal_subtrees, subtrees_by_rank

_REFUSES = -1
"""In all places of a row: this rank refuses any sums that were kept."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The share of one rank in the parts of a step.

    Attributes:
        parts: V.
        rank: the rank.
        numbers: the parts that it computes, from left to right; at least one.
        nodes: for each rank, the nodes whose sums it gives, from left to right. Together they are the whole tree.
        kept: the nodes that this rank has from an undone attempt.
        repeats: True if nothing is left for this rank to compute. It computes one part all the same, because the
            script's loop leads to the collectives, and drops its gradients.
    """

    parts: int
    rank: int
    numbers: tuple[int, ...]
    nodes: tuple[tuple[Node, ...], ...]
    kept: tuple[Node, ...] = ()
    repeats: bool = False

    @property
    def root(self) -> int:
        """The rank whose sums contain part 0."""
        return next(rank for rank, nodes in enumerate(self.nodes) if nodes and nodes[0][0] == 0)


def even_plan(rank: int, world: int, parts: int) -> RankPlan:
    """Returns the share of a rank in an undisturbed step.

    Raises:
        ValueError: there are fewer parts than ranks.
    """
    return plan_ranks(((),) * world, parts)[rank]


@lru_cache(maxsize=64)
def plan_ranks(held: tuple[tuple[Node, ...], ...], parts: int) -> tuple[RankPlan, ...]:
    """Returns the share of each rank.

    Of nodes that overlap the greatest is kept, of equal ones that of the lowest rank. The missing parts are divided in
    one range for each rank, whose lengths differ by 1 at most.

    Args:
        held: for each rank, the nodes of which it has sums.
        parts: V.

    Raises:
        ValueError: there are fewer parts than ranks.
    """
    world = len(held)
    if parts < world:
        raise ValueError(f"{parts} parts for {world} ranks: each computes at least one")
    taken: set[int] = set()
    kept: list[list[Node]] = [[] for _ in held]
    for node, rank in sorted(
        ((node, rank) for rank, nodes in enumerate(held) for node in nodes),
        key=lambda found: (found[0][0] - found[0][1], found),
    ):
        if taken.isdisjoint(range(*node)):
            taken.update(range(*node))
            kept[rank].append(node)
    missing = [number for number in range(parts) if number not in taken]
    own = [missing[slice(*leaves_of(rank, world, len(missing)))] for rank in range(world)]
    nodes = tuple(
        joined([*kept[rank], *((number, number + 1) for number in own[rank])], parts) for rank in range(world)
    )
    if not taken:
        nodes = subtrees_by_rank(world, parts)  # the same, and the object that others compare with
    usual = [leaves_of(rank, world, parts)[0] for rank in range(world)]
    return tuple(
        RankPlan(
            parts, rank, tuple(own[rank]) or (usual[rank],), nodes, tuple(sorted(kept[rank])), repeats=not own[rank]
        )
        for rank in range(world)
    )


@lru_cache(maxsize=64)
def sums_at_once(share: RankPlan) -> int:
    """Returns the greatest number of sums that a rank has at one time while it computes its parts."""
    ranges = [(number, number + 1) for number in share.numbers]
    return max(len(joined([*share.kept, *ranges[:count]], share.parts)) for count in range(1, len(ranges) + 1))


def row_of_held(nodes: Iterable[Node] | None, parts: int) -> NDArray[np.int64]:
    """Returns nodes as one row of numbers, shape [V]: at place lo the end of a node [lo, hi), elsewhere 0.

    None becomes a row of -1: no rank may use sums that were kept.
    """
    row = np.full(parts, _REFUSES if nodes is None else 0, np.int64)
    for lo, hi in nodes or ():
        row[lo] = hi
    return row


def held_of_row(row: NDArray[np.int64]) -> tuple[Node, ...] | None:
    """Returns the nodes of a row, which another rank may have sent; None if it refuses any sums.

    Args:
        row: as from `row_of_held`, shape [V].

    Raises:
        ValueError: they are not disjoint nodes of the tree.
    """
    if (row == _REFUSES).all():
        return None
    nodes, end = [], 0
    for lo, hi in enumerate(row.tolist()):
        if not hi:
            continue
        if not end <= lo < hi <= len(row) or maximal_subtrees(lo, hi, len(row)) != ((lo, hi),):
            raise ValueError(f"holds the parts {lo} to {hi - 1}, which are not a node of {len(row)} parts, or overlap")
        nodes.append((lo, end := hi))
    return tuple(nodes)
