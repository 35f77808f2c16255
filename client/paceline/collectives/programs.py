"""Every collective's schedules by name, and the program that one of them makes of a size. Pure, and cached.

Letters: r rank, W world size, n elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from paceline.collectives.program import Bounds, Layout, Program, compile_rows
from paceline.collectives.rows import Nodes, Row, Sums, chunk_bounds
from paceline.collectives.schedules import gathering, hierarchical, reducing, spreading, waiting

__all__ = [
    "SCHEDULES",
    "Schedule",
    "all_gather_program",
    "all_reduce_program",
    "all_to_all_program",
    "barrier_program",
    "broadcast_program",
    "chunks_of",
    "gather_program",
    "reduce_program",
    "reduce_scatter_program",
    "rows_of",
    "scatter_program",
]


class Schedule(NamedTuple):
    """A way to do a collective.

    Attributes:
        rows: makes the rows from (rank, world), for a rooted collective from (rank, world, root).
        chunks: number of chunks for a world size.
        by_node: both get the ranks' nodes as a last argument.
        pass_on: as in `compile_rows`.
        lend: as in `Program`.
        sums: of those that reduce.
    """

    rows: Callable[..., list[Row]]
    chunks: Callable[..., int]
    by_node: bool = False
    pass_on: bool = True
    lend: bool = True
    sums: Sums = Sums.ONCE


def _one(world: int) -> int:
    return 1


def _all(world: int) -> int:
    return world


def _both(world: int) -> int:
    return 2 * world


SCHEDULES: Mapping[str, Mapping[str, Schedule]] = {
    "all_reduce": {
        # Rank 0 must not send back to a rank that is still sending: both links could be full, and both would wait.
        "star": Schedule(reducing.star_all_reduce, _one, pass_on=False, sums=Sums.IN_RANK_ORDER),
        "direct": Schedule(reducing.direct_all_reduce, _all, sums=Sums.IN_RANK_ORDER),
        "ring": Schedule(reducing.ring_all_reduce, _all),
        # Ranks write over what they have just sent.
        "recursive_doubling": Schedule(reducing.doubling_all_reduce, _one, lend=False, sums=Sums.ALIKE),
        "halving_doubling": Schedule(reducing.halving_doubling_all_reduce, reducing.power_of_two),
        "hierarchical": Schedule(hierarchical.hierarchical_all_reduce, hierarchical.hierarchical_chunks, by_node=True),
    },
    "reduce": {
        "star": Schedule(reducing.star_reduce, _one, sums=Sums.IN_RANK_ORDER),
        "tree": Schedule(reducing.tree_reduce, _one),
    },
    "reduce_scatter": {
        "direct": Schedule(reducing.direct_reduce_scatter, _all, sums=Sums.IN_RANK_ORDER),
        "ring": Schedule(reducing.ring_reduce_scatter, _all),
    },
    "broadcast": {
        "tree": Schedule(spreading.tree_broadcast, _one),
        "scatter_all_gather": Schedule(spreading.scatter_broadcast, _all),
    },
    "scatter": {"direct": Schedule(spreading.direct_scatter, _all)},
    "all_gather": {
        "direct": Schedule(gathering.direct_all_gather, _all),
        "bruck": Schedule(gathering.bruck_all_gather, _all),
        "ring": Schedule(gathering.ring_all_gather, _all),
    },
    "gather": {"direct": Schedule(gathering.direct_gather, _all)},
    "all_to_all": {"pairwise": Schedule(gathering.pairwise_all_to_all, _both)},
    "barrier": {
        "dissemination": Schedule(waiting.dissemination_barrier, _one, lend=False),
        "ring": Schedule(waiting.ring_barrier, _one, lend=False),
        "star": Schedule(waiting.star_barrier, _one, pass_on=False, lend=False),
    },
}
"""Collective to schedule to how it goes. The choice among them is `choose.py`."""

ROOTED = frozenset({"reduce", "broadcast", "scatter", "gather"})
"""Collectives whose rows depend on a root."""


def rows_of(collective: str, schedule: str, rank: int, world: int, root: int = 0, nodes: Nodes = ()) -> list[Row]:
    """One rank's rows; `root` counts for rooted collectives only, `nodes` for schedules that go by them."""
    how = SCHEDULES[collective][schedule]
    if how.by_node:
        return how.rows(rank, world, nodes)
    return how.rows(rank, world, root) if collective in ROOTED else how.rows(rank, world)


def chunks_of(collective: str, schedule: str, world: int, nodes: Nodes = ()) -> int:
    """The number of chunks that rows speak of."""
    how = SCHEDULES[collective][schedule]
    return how.chunks(world, nodes) if how.by_node else how.chunks(world)


@lru_cache(maxsize=512)
def all_reduce_program(schedule: str, rank: int, world: int, n: int, segment: int, nodes: Nodes = ()) -> Program:
    """N elements at each rank, before and after."""
    bounds = chunk_bounds(n, chunks_of("all_reduce", schedule, world, nodes))
    return _compile("all_reduce", schedule, rank, world, Layout(bounds, bounds), segment, nodes=nodes)


@lru_cache(maxsize=256)
def reduce_program(schedule: str, rank: int, world: int, root: int, n: int, segment: int) -> Program:
    """N elements at each rank; the result at the root."""
    layout = Layout([(0, n)], [(0, n) if rank == root else None])
    return _compile("reduce", schedule, rank, world, layout, segment, root)


@lru_cache(maxsize=256)
def reduce_scatter_program(schedule: str, rank: int, world: int, n: int, segment: int) -> Program:
    """N elements at each rank, of which each gets its chunk."""
    bounds = chunk_bounds(n, world)
    return _compile("reduce_scatter", schedule, rank, world, Layout(bounds, _only(rank, bounds)), segment)


@lru_cache(maxsize=256)
def broadcast_program(schedule: str, rank: int, world: int, root: int, n: int, segment: int) -> Program:
    """N elements at the root, then everywhere."""
    bounds = chunk_bounds(n, chunks_of("broadcast", schedule, world))
    layout = Layout(bounds if rank == root else [None] * len(bounds), bounds)
    return _compile("broadcast", schedule, rank, world, layout, segment, root)


@lru_cache(maxsize=256)
def scatter_program(rank: int, world: int, root: int, n: int, segment: int) -> Program:
    """W times n elements at the root; n of them at each rank."""
    bounds = chunk_bounds(n * world, world)
    out = _only(rank, bounds)
    layout = Layout(bounds if rank == root else [None] * world, out)
    return _compile("scatter", "direct", rank, world, layout, segment, root)


@lru_cache(maxsize=64)
def all_gather_program(schedule: str, rank: int, world: int, sizes: tuple[int, ...], segment: int) -> Program:
    """sizes[r] elements at rank r; all of them everywhere, in rank order.

    By "bruck" a rank's own are in the result from the start: they travel together with others' elements.
    """
    out = _places(sizes)
    base: list[Bounds | None] = [None] * world
    if schedule != "bruck":
        base[rank] = (0, sizes[rank])
    return _compile("all_gather", schedule, rank, world, Layout(base, out), segment)


@lru_cache(maxsize=64)
def gather_program(rank: int, world: int, root: int, sizes: tuple[int, ...], segment: int) -> Program:
    """sizes[r] elements at rank r; all of them at the root, in rank order. Elsewhere only the own size counts."""
    base: list[Bounds | None] = [None] * world
    base[rank] = (0, sizes[rank])
    layout = Layout(base, _places(sizes) if rank == root else [None] * world)
    return _compile("gather", "direct", rank, world, layout, segment, root)


@lru_cache(maxsize=64)
def all_to_all_program(
    rank: int, world: int, sent: tuple[int, ...], received: tuple[int, ...], segment: int
) -> Program:
    """sent[c] elements for rank c, one after the other; received[c] of rank c likewise."""
    base: list[Bounds | None] = [*_places(sent), *[None] * world]
    base[world + rank] = base[rank]
    layout = Layout(base, [*[None] * world, *_places(received)])
    return _compile("all_to_all", "pairwise", rank, world, layout, segment)


@lru_cache(maxsize=16)
def barrier_program(schedule: str, rank: int, world: int) -> Program:
    """Empty frames."""
    return _compile("barrier", schedule, rank, world, Layout([(0, 0)], [(0, 0)]), 1)


def _compile(
    collective: str,
    schedule: str,
    rank: int,
    world: int,
    layout: Layout,
    segment: int,
    root: int = 0,
    nodes: Nodes = (),
) -> Program:
    how = SCHEDULES[collective][schedule]
    rows = rows_of(collective, schedule, rank, world, root, nodes)
    return compile_rows(rows, layout, segment, pass_on=how.pass_on, lend=how.lend)


def _places(sizes: Sequence[int]) -> list[Bounds]:
    """Bounds of chunks of these sizes that lie one after the other."""
    return list(pairwise(accumulate(sizes, initial=0)))


def _only(rank: int, bounds: Sequence[Bounds]) -> list[Bounds | None]:
    """A result that holds the rank's own chunk and no other."""
    lo, hi = bounds[rank]
    return [(0, hi - lo) if c == rank else None for c in range(len(bounds))]
