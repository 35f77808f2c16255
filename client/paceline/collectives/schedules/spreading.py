"""Schedules that spread what the root holds.

Letters: r rank, W world size, c chunk, t place in the tree: (r - root) mod W.
"""

from __future__ import annotations

from paceline.collectives.rows import Row

__all__ = ["direct_scatter", "scatter_broadcast", "tree_broadcast", "tree_children", "tree_parent"]


def tree_parent(rank: int, world: int, root: int) -> int | None:
    """Who sends to a rank in `tree_broadcast` and in the first step of `scatter_broadcast`; None for the root."""
    place = (rank - root) % world
    return ((place - 1) // 2 + root) % world if place else None


def tree_children(rank: int, world: int, root: int) -> list[int]:
    """To whom a rank sends in `tree_broadcast`."""
    place = (rank - root) % world
    return [(child + root) % world for child in (2 * place + 1, 2 * place + 2) if child < world]


def tree_broadcast(rank: int, world: int, root: int) -> list[Row]:
    """One chunk. A binary tree, rotated so that the root is its top: floor(log2 W) steps deep."""
    rows = []
    parent = tree_parent(rank, world, root)
    if parent is not None:
        rows.append(Row(0, recv_from=parent, recv_chunk=0))
    return rows + [Row(1, send_to=child, send_chunk=0) for child in tree_children(rank, world, root)]


def scatter_broadcast(rank: int, world: int, root: int) -> list[Row]:
    """W chunks, by place. Scatter down the binary tree, then all-gather around the ring: every link carries about 1.

    A child gets the chunks of its own subtree, level by level, so the first frame comes from the same rank as in
    `tree_broadcast`: a receiver that knows neither dtype nor shape needs not know the schedule either.

    Source: van de Geijn, "On global combine operations", 1994, with a tree that needs no power of two.
    """
    place = (rank - root) % world
    rows = []
    parent = tree_parent(rank, world, root)
    if parent is not None:
        rows += [Row(0, recv_from=parent, recv_chunk=first, span=span) for first, span in _levels(place, world)]
    for child in tree_children(rank, world, root):
        rows += [
            Row(1, send_to=child, send_chunk=first, span=span) for first, span in _levels((child - root) % world, world)
        ]
    for s in range(world - 1):
        sent, received = (place - s) % world, (place - s - 1) % world
        # The root holds all chunks, and everybody those of its subtree; they are not sent to them again.
        give = (place + 1) % world != 0 and not _holds((place + 1) % world, sent)
        take = place != 0 and not _holds(place, received)
        row = Row(2 + s)
        if give:
            row = row._replace(send_to=(rank + 1) % world, send_chunk=sent)
        if take:
            row = row._replace(recv_from=(rank - 1) % world, recv_chunk=received)
        if give or take:
            rows.append(row)
    return rows


def direct_scatter(rank: int, world: int, root: int) -> list[Row]:
    """W chunks. The root sends chunk c to rank c."""
    if rank != root:
        return [Row(0, recv_from=root, recv_chunk=rank)]
    return [Row(0, send_to=peer, send_chunk=peer) for peer in range(world) if peer != root]


def _levels(place: int, world: int) -> list[tuple[int, int]]:
    """The places of a subtree, as (first, number) of each level."""
    levels, first, span = [], place, 1
    while first < world:
        levels.append((first, min(span, world - first)))
        first, span = 2 * first + 1, 2 * span
    return levels


def _holds(place: int, chunk: int) -> bool:
    """True if the chunk lies in the subtree of the place."""
    while chunk > place:
        chunk = (chunk - 1) // 2
    return chunk == place
