"""Which part of a spread state a member holds, and whether members hold all of it between them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["WHOLE", "Share", "lacking", "share_of"]


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


def lacking(shares: Iterable[Share]) -> tuple[Share, ...]:
    """What is not there of the cut that lacks least; nothing if the state is there."""
    there = set(shares)
    cuts = {share.parts for share in there} or {1}
    lacks = [tuple(Share(part, parts) for part in range(parts) if Share(part, parts) not in there) for parts in cuts]
    return min(lacks, key=len)
