"""From a schedule's rows to one rank's program: every frame that it sends and receives, in one order. Pure.

It owns segments and pipelining. Chunks are cut into segments, one frame each. Receives stand in the order of the rows;
a send stands right behind the receive that makes it possible, so that a rank passes a segment on, and reduces it, while
the next one is still on its way. Because the order is known beforehand, running it takes one thread and no queue.

Letters: n elements, c chunk, j segment within a chunk, W world size.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from paceline.collectives import schedules
from paceline.collectives.schedules import Action, Row

__all__ = [
    "AHEAD",
    "SEGMENT_BYTES",
    "Do",
    "Move",
    "Program",
    "all_reduce_program",
    "barrier_program",
    "broadcast_program",
    "compile_rows",
]

SEGMENT_BYTES = 1 << 20
"""Bytes per frame, of collectives and of messages. Source: as for `AHEAD`."""

AHEAD = 4
"""A row that sends and receives is never more segments ahead with sending than this. So the sender keeps the pace of
its neighbours, and a link needs to hold no more than 4 frames of 1 MiB on their way for nobody to wait for ever.
Source: measured on gRPC streams on loopback: 1 MiB x 4 was best, 1.5 GB/s."""


class Do(IntEnum):
    """What a move does; receives have the numbers of `Action`."""

    STORE = Action.STORE
    REDUCE = Action.REDUCE
    FINALIZE = Action.FINALIZE
    SEND = 3


class Move(NamedTuple):
    """One frame of a program.

    Attributes:
        do: send, or what to do with what is received.
        peer: rank at the other end.
        part: number of the frame among those to (or from) this peer.
        lo: first element.
        hi: end of the elements, exclusive. May equal `lo`: an empty frame still shows that both agree.
        fresh: this rank's own value is still in the argument: nothing was received for this segment before.
    """

    do: Do
    peer: int
    part: int
    lo: int
    hi: int
    fresh: bool


class Program(NamedTuple):
    """All moves of one rank in order.

    Attributes:
        moves: the moves.
        covered: False if some elements are only in the argument at the end (a broadcast's root, a world of one).
    """

    moves: tuple[Move, ...]
    covered: bool


class _Send(NamedTuple):
    """A segment to send once `after` of this rank's receives are done."""

    after: int
    lo: int
    hi: int
    fresh: bool


def compile_rows(rows: Sequence[Row], n: int, chunks: int, segment: int, *, pass_on: bool = True) -> Program:
    """Turns rows into a program.

    Args:
        rows: one rank's rows.
        n: elements of the array.
        chunks: number of chunks that the array is cut into.
        segment: elements per segment, at least 1.
        pass_on: a row may send a segment as soon as it is there; if False, only when all earlier rows have received.
    """
    pieces = [_pieces(lo, hi, segment) for lo, hi in schedules.chunk_bounds(n, chunks)]
    have = [[0] * len(chunk) for chunk in pieces]  # [c][j]: how many receives make what this rank holds of it
    receives: list[Move] = []
    sends: dict[int, deque[_Send]] = {}  # by destination, in the order of rows
    heard: Counter[int] = Counter()
    for row in rows:
        incoming = [] if row.recv_chunk is None else pieces[row.recv_chunk]
        if row.send_to is not None and row.send_chunk is not None:
            queue = sends.setdefault(row.send_to, deque())
            for j, (lo, hi) in enumerate(pieces[row.send_chunk]):
                made_by = have[row.send_chunk][j]
                after = made_by if pass_on else len(receives)
                if incoming:
                    after = max(after, len(receives) + min(j - AHEAD + 1, len(incoming)))
                queue.append(_Send(after, lo, hi, made_by == 0))
        if row.recv_from is not None and row.recv_chunk is not None:
            for j, (lo, hi) in enumerate(incoming):
                fresh = have[row.recv_chunk][j] == 0
                receives.append(Move(Do(row.action), row.recv_from, heard[row.recv_from], lo, hi, fresh))
                heard[row.recv_from] += 1
                have[row.recv_chunk][j] = len(receives)
    return Program(tuple(_interleave(receives, sends)), all(all(counts) for counts in have))


def _interleave(receives: Sequence[Move], sends: dict[int, deque[_Send]]) -> Iterator[Move]:
    """Puts every send right behind the receive that makes it possible.

    All sends of a row come before the first receive of the next row, for `after` never counts beyond the own row's
    receives. So no receive overwrites what is still to be sent, in place too.
    """
    told: Counter[int] = Counter()
    for done in range(len(receives) + 1):
        for peer, queue in sends.items():
            while queue and queue[0].after <= done:
                _, lo, hi, fresh = queue.popleft()
                yield Move(Do.SEND, peer, told[peer], lo, hi, fresh)
                told[peer] += 1
        if done < len(receives):
            yield receives[done]


def _pieces(lo: int, hi: int, segment: int) -> list[tuple[int, int]]:
    """Segments of [lo, hi); an empty chunk is one empty segment."""
    return [(at, min(at + segment, hi)) for at in range(lo, hi, segment)] or [(lo, hi)]


@lru_cache(maxsize=256)
def all_reduce_program(schedule: str, rank: int, world: int, n: int, segment: int) -> Program:
    """The program of an all_reduce by "ring" or "star"."""
    if schedule == "ring":
        return compile_rows(schedules.ring_all_reduce(rank, world), n, world, segment)
    assert schedule == "star", schedule
    # Rank 0 must not send back to a rank that is still sending: both links could be full, and both would wait.
    return compile_rows(schedules.star_all_reduce(rank, world), n, 1, segment, pass_on=False)


@lru_cache(maxsize=256)
def broadcast_program(rank: int, world: int, root: int, n: int, segment: int) -> Program:
    """The program of a broadcast along the tree."""
    return compile_rows(schedules.tree_broadcast(rank, world, root), n, 1, segment)


@lru_cache(maxsize=8)
def barrier_program(rank: int, world: int) -> Program:
    """The program of a barrier: empty frames."""
    return compile_rows(schedules.dissemination_barrier(rank, world), 0, 1, 1)
