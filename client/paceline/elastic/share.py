"""Which part of a spread state a member holds. Pure; the coordinator's is `paceline_server.shares`."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["WHOLE", "Share", "share_of"]


class Share(NamedTuple):
    """One of the parts that a state is cut into; all parts together, and of one cut, are the state."""

    part: int
    """From 0."""
    parts: int
    """How many there are; 1 where the state is whole."""


WHOLE = Share(0, 1)


def share_of(rank: int, world: int, node_size: int) -> Share:
    """What a rank is to hold.

    Args:
        rank: the rank.
        world: ranks in the view.
        node_size: so many ranks hold one copy of the state between them: 1 where each holds it whole, 0 for all ranks.
    """
    size = node_size or world
    return Share(rank % size, size)
