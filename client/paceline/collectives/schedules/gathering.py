"""Schedules that put together what the ranks hold, one chunk of each; and those that exchange chunks between all.

Letters: r rank, W world size, c chunk, s step.
"""

from __future__ import annotations

from paceline.collectives.rows import Row, ring_neighbours

__all__ = ["bruck_all_gather", "direct_all_gather", "direct_gather", "pairwise_all_to_all", "ring_all_gather"]


def ring_all_gather(rank: int, world: int) -> list[Row]:
    """W chunks. Each goes around the ring: W-1 steps, two links a rank."""
    prev, next_ = ring_neighbours(rank, world)
    return [Row(s, next_, (rank - s) % world, prev, (rank - s - 1) % world) for s in range(world - 1)]


def direct_all_gather(rank: int, world: int) -> list[Row]:
    """W chunks. Everyone sends to everyone: one step in latency, W-1 links a rank."""
    return [Row(0, (rank + s) % world, rank, (rank - s) % world, (rank - s) % world) for s in range(1, world)]


def bruck_all_gather(rank: int, world: int) -> list[Row]:
    """W chunks. Step s: give all that you hold to rank r - 2^s; ceil(log2 W) steps and as many links.

    Source: Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
    1997.
    """
    rows: list[Row] = []
    step, held = 0, 1
    while held < world:
        count = min(held, world - held)
        to, source = (rank - held) % world, (rank + held) % world
        rows += [Row(step, send_to=to, send_chunk=c, span=k) for c, k in _around(rank, count, world)]
        rows += [Row(step, recv_from=source, recv_chunk=c, span=k) for c, k in _around(source, count, world)]
        step, held = step + 1, held + count
    return rows


def direct_gather(rank: int, world: int, root: int) -> list[Row]:
    """W chunks. Rank c sends chunk c to the root."""
    if rank != root:
        return [Row(0, send_to=root, send_chunk=rank)]
    return [Row(0, recv_from=peer, recv_chunk=peer) for peer in range(world) if peer != root]


def pairwise_all_to_all(rank: int, world: int) -> list[Row]:
    """2W chunks at each rank: c for what it sends to rank c, W + c for what it receives from rank c."""
    rows = []
    for s in range(1, world):
        to, source = (rank + s) % world, (rank - s) % world
        rows.append(Row(0, to, to, source, world + source))
    return rows


def _around(first: int, count: int, world: int) -> list[tuple[int, int]]:
    """`count` chunks from `first` on, around the end, as (first, number) of each run."""
    before = min(count, world - first)
    return [(first, before)] + ([(0, count - before)] if count > before else [])
