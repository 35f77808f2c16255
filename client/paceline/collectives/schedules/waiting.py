"""Schedules that carry no array: barriers. One empty chunk.

Letters: r rank, W world size, s step.
"""

from __future__ import annotations

from paceline.collectives.rows import Row, ring_neighbours

__all__ = ["dissemination_barrier", "ring_barrier", "star_barrier"]


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


def star_barrier(rank: int, world: int) -> list[Row]:
    """All tell rank 0, which then tells all: two steps, and every other rank waits once.

    For more ranks than cores: whoever waits has to be switched to again, and here that is the fewest times.
    """
    if rank:
        return [Row(0, send_to=0, send_chunk=0), Row(1, recv_from=0, recv_chunk=0)]
    others = range(1, world)
    rows = [Row(0, recv_from=peer, recv_chunk=0) for peer in others]
    return rows + [Row(1, send_to=peer, send_chunk=0) for peer in others]


def ring_barrier(rank: int, world: int) -> list[Row]:
    """A token goes around twice: once it has come back all have arrived, and its second round lets them go.

    2W steps in latency, two messages and two links a rank: the fewest.
    """
    if world == 1:
        return []
    prev, next_ = ring_neighbours(rank, world)
    give, take = Row(0, send_to=next_, send_chunk=0), Row(0, recv_from=prev, recv_chunk=0)
    wave = (give, take) if rank == 0 else (take, give)
    return [row._replace(step=step) for step, row in enumerate(wave * 2)]
