"""Schedules: who sends which chunk to whom at which step. Pure arithmetic that can be printed.

A rank carries out its rows in order. A row may send one chunk, receive one chunk, or do both at once. What a row sends
is what its rank holds of that chunk once all its earlier rows have received.

Letters: r rank, W world size, n elements, c chunk, s step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "Action",
    "Row",
    "chunk_bounds",
    "dissemination_barrier",
    "format_schedule",
    "ring_all_reduce",
    "ring_neighbours",
    "star_all_reduce",
    "tree_broadcast",
    "tree_children",
    "tree_parent",
]


class Action(IntEnum):
    """What the receiver does with a chunk."""

    STORE = 0
    """Keep it in place of its own."""
    REDUCE = 1
    """Combine it with what it holds."""
    FINALIZE = 2
    """Combine it, and the total is complete: divide, for a mean."""


class Row(NamedTuple):
    """One step of one rank. A side that is None does nothing.

    Attributes:
        step: from 0.
        send_to: rank to send to.
        send_chunk: chunk to send.
        recv_from: rank to receive from.
        recv_chunk: chunk to receive.
        action: what to do with the received chunk.
    """

    step: int
    send_to: int | None = None
    send_chunk: int | None = None
    recv_from: int | None = None
    recv_chunk: int | None = None
    action: Action = Action.STORE


def ring_neighbours(rank: int, world: int) -> tuple[int, int]:
    """(previous, next) on the ring."""
    return (rank + world - 1) % world, (rank + 1) % world


def chunk_bounds(n: int, parts: int) -> list[tuple[int, int]]:
    """Bounds [i*n//parts, (i+1)*n//parts) of each part: contiguous, and of sizes that differ by 1 at most."""
    return [(i * n // parts, (i + 1) * n // parts) for i in range(parts)]


def ring_all_reduce(rank: int, world: int) -> list[Row]:
    """Reduce-scatter around the ring, then all-gather: 2(W-1) steps, 2(W-1)/W of the array sent by each rank.

    Chunk c is summed in the order ((x_c + x_(c+1)) + ...) + x_(c+W-1), indices modulo W; the last of them, rank
    (c-1) mod W, owns the total and the others copy it, so that all ranks hold the same bits.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    prev, next_ = ring_neighbours(rank, world)
    rows = []
    for s in range(world - 1):
        action = Action.FINALIZE if s == world - 2 else Action.REDUCE
        rows.append(Row(s, next_, (rank - s) % world, prev, (rank - s - 1) % world, action))
    for s in range(world - 1):
        rows.append(Row(world - 1 + s, next_, (rank + 1 - s) % world, prev, (rank - s) % world, Action.STORE))
    return rows


def star_all_reduce(rank: int, world: int) -> list[Row]:
    """All send to rank 0, which folds ((x_0 + x_1) + x_2) + ... and sends the total back: two steps in latency."""
    if rank != 0:
        return [Row(0, send_to=0, send_chunk=0), Row(1, recv_from=0, recv_chunk=0)]
    last = world - 1
    rows = [
        Row(0, recv_from=peer, recv_chunk=0, action=Action.FINALIZE if peer == last else Action.REDUCE)
        for peer in range(1, world)
    ]
    return rows + [Row(1, send_to=peer, send_chunk=0) for peer in range(1, world)]


def tree_parent(rank: int, world: int, root: int) -> int | None:
    """Who sends to a rank in `tree_broadcast`; None for the root."""
    place = (rank - root) % world
    return ((place - 1) // 2 + root) % world if place else None


def tree_children(rank: int, world: int, root: int) -> list[int]:
    """To whom a rank sends in `tree_broadcast`."""
    place = (rank - root) % world
    return [(child + root) % world for child in (2 * place + 1, 2 * place + 2) if child < world]


def tree_broadcast(rank: int, world: int, root: int) -> list[Row]:
    """A binary tree, rotated so that the root is its top: floor(log2 W) steps deep, whole array as one chunk."""
    rows = []
    parent = tree_parent(rank, world, root)
    if parent is not None:
        rows.append(Row(0, recv_from=parent, recv_chunk=0))
    rows.extend(Row(1 + i, send_to=child, send_chunk=0) for i, child in enumerate(tree_children(rank, world, root)))
    return rows


def dissemination_barrier(rank: int, world: int) -> list[Row]:
    """Step s: tell rank r + 2^s, hear from rank r - 2^s. After ceil(log2 W) steps a rank has heard of all.

    Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.
    """
    rows = []
    step, distance = 0, 1
    while distance < world:
        rows.append(Row(step, (rank + distance) % world, 0, (rank - distance) % world, 0))
        step, distance = step + 1, distance * 2
    return rows


def format_schedule(rows: Sequence[Row]) -> str:
    """A table for people."""
    lines = ["step  send          receive"]
    for row in rows:
        send = f"{row.send_chunk} to {row.send_to}" if row.send_to is not None else "-"
        recv = f"{row.recv_chunk} from {row.recv_from}: {row.action.name.lower()}" if row.recv_from is not None else "-"
        lines.append(f"{row.step:>4}  {send:<12}  {recv}")
    return "\n".join(lines)
