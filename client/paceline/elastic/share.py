"""Which part of a sharded state a member holds. Pure; the same rule as the coordinator's `paceline_server.shares`."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["WHOLE", "Share", "share_of"]


class Share(NamedTuple):
    """One of the parts that a state is cut into; all parts of one cut together are the state."""

    part: int
    """Number of the part, from 0."""
    parts: int
    """Number of parts; 1 if the state is not sharded."""


WHOLE = Share(0, 1)


def share_of(rank: int, world: int, node_size: int) -> Share:
    """The share that a rank holds.

    Args:
        rank: the rank.
        world: number of ranks in the view.
        node_size: number of ranks that hold one copy of the state between them: 1 if each holds it whole, 0 for all.
    """
    size = node_size or world
    return Share(rank % size, size)
