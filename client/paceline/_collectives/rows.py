"""The rows of a schedule: which rank sends which chunk to which rank, step by step. They can be printed.

A schedule is a list of rows for each rank, made from (rank, world) alone. Rows of one step go on at the same time,
segment by segment; what a step sends is what its rank held before it. Nothing here touches an array or a socket.

Letters: r rank, W world size, n elements, c chunk, s step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

__all__ = ["Action", "Nodes", "Row", "SumOrder", "chunk_bounds", "format_schedule", "ring_neighbours"]

Nodes: TypeAlias = tuple[int, ...]
"""For each rank the number of its node, from 0 in the order of the lowest ranks: ranks of one node share memory. Empty
where nothing is known of it."""


class Action(IntEnum):
    """What the receiver does with a chunk."""

    STORE = 0
    """Keep it in place of its own."""
    REDUCE = 1
    """Combine it with what it holds."""
    FINALIZE = 2
    """Combine it, and the total is complete: divide, for a mean."""
    FOLD = 3
    """Set it aside until all rows of the step have theirs; then combine all with its own, in rank order."""


class SumOrder(IntEnum):
    """Where and in which order a schedule combines the values of an element. Each member includes those before it."""

    ALIKE = 0
    """At several ranks, each by itself, from the same pairs."""
    ONCE = 1
    """At one rank; the others copy."""
    IN_RANK_ORDER = 2
    """At one rank, from all values: ((x_0 + x_1) + x_2) + ... whatever the size and world."""


class Row(NamedTuple):
    """One step of one rank with one peer, or two. A side that is None does nothing.

    Attributes:
        step: from 0.
        send_to: rank to send to.
        send_chunk: chunk to send.
        recv_from: rank to receive from.
        recv_chunk: chunk to receive.
        action: what to do with the received chunk.
        span: number of chunks, from `send_chunk` and from `recv_chunk` on.
    """

    step: int
    send_to: int | None = None
    send_chunk: int | None = None
    recv_from: int | None = None
    recv_chunk: int | None = None
    action: Action = Action.STORE
    span: int = 1


def ring_neighbours(rank: int, world: int) -> tuple[int, int]:
    """(previous, next) on the ring."""
    return (rank + world - 1) % world, (rank + 1) % world


def chunk_bounds(n: int, parts: int) -> list[tuple[int, int]]:
    """Bounds [i*n//parts, (i+1)*n//parts) of each part: contiguous, and of sizes that differ by 1 at most."""
    return [(i * n // parts, (i + 1) * n // parts) for i in range(parts)]


def format_schedule(rows: Sequence[Row]) -> str:
    """A table for people."""
    lines = ["step  send           receive"]
    for row in rows:
        send = f"{_chunks(row.send_chunk, row.span)} to {row.send_to}" if row.send_chunk is not None else "-"
        recv = "-"
        if row.recv_chunk is not None:
            recv = f"{_chunks(row.recv_chunk, row.span)} from {row.recv_from}: {row.action.name.lower()}"
        lines.append(f"{row.step:>4}  {send:<13}  {recv}")
    return "\n".join(lines)


def _chunks(first: int, span: int) -> str:
    return str(first) if span == 1 else f"{first}-{first + span - 1}"
