"""The rows of a schedule: which rank sends which chunk to which rank, step by step. They can be printed.

A schedule is a list of rows for each rank, made from (rank, world) alone. Rows of one step run at the same time,
segment by segment; a rank sends what it held before the step. Nothing here touches an array or a socket.

Letters: r rank, W world size, n elements, c chunk, s step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

Nodes: TypeAlias = tuple[int, ...]
"""The number of each rank's node, from 0 in the order of the lowest ranks; ranks of one node share memory. Empty if
nodes are not known."""


class Action(IntEnum):
    """The action of the receiver on a chunk."""

    STORE = 0
    """Store it in place of the receiver's own."""
    REDUCE = 1
    """Combine it with the receiver's own."""
    FINALIZE = 2
    """Combine it; the total is then complete, so a mean divides it."""
    FOLD = 3
    """Set it aside until all rows of the step have received theirs; then combine all in rank order, with the own."""


class SumRule(IntEnum):
    """Where and in which order a schedule combines the values of an element. Each value implies those before it."""

    ALIKE = 0
    """Several ranks each combine the same pairs."""
    ONCE = 1
    """One rank combines; the others copy the result."""
    IN_RANK_ORDER = 2
    """One rank combines all values: ((x_0 + x_1) + x_2) + ... whatever the size and world."""


class Row(NamedTuple):
    """One step of one rank with one or two peers. If a side is None, nothing is sent or received.

    `span` chunks go each way, starting at `send_chunk` and at `recv_chunk`. `action` is for the received ones.
    """

    step: int
    send_to: int | None = None
    send_chunk: int | None = None
    recv_from: int | None = None
    recv_chunk: int | None = None
    action: Action = Action.STORE
    span: int = 1


def ring_neighbours(rank: int, world: int) -> tuple[int, int]:
    """Returns (previous, next) on the ring."""
    return (rank + world - 1) % world, (rank + 1) % world


def chunk_bounds(n: int, parts: int) -> list[tuple[int, int]]:
    """Returns bounds [i*n//parts, (i+1)*n//parts) of each part: contiguous, with sizes that differ by 1 at most."""
    return [(i * n // parts, (i + 1) * n // parts) for i in range(parts)]


def format_schedule(rows: Sequence[Row]) -> str:
    """Formats rows as a table for people."""
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
