"""The choice among schedules. It depends on facts that all ranks share, bytes and world size, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

__all__ = ["Choice", "Chooser", "choose_all_reduce"]

STAR_MAX_BYTES = 64 << 10
"""Up to here latency decides: 2 steps of the star against 2(W-1) of the ring."""

STAR_MAX_WORLD = 8
"""Up to here rank 0 takes in one small frame per rank faster than a ring turns."""


class Choice(NamedTuple):
    """A schedule by name ("ring" or "star"), and why."""

    schedule: str
    reason: str


Chooser: TypeAlias = Callable[[int, int], Choice]


def choose_all_reduce(nbytes: int, world: int) -> Choice:
    """The schedule for an all_reduce of `nbytes` bytes over `world` ranks."""
    if nbytes <= STAR_MAX_BYTES and world <= STAR_MAX_WORLD:
        return _STAR
    return _RING


_STAR = Choice("star", f"at most {STAR_MAX_BYTES} bytes and {STAR_MAX_WORLD} ranks: fewest steps")
_RING = Choice("ring", f"more than {STAR_MAX_BYTES} bytes or {STAR_MAX_WORLD} ranks: each link carries an equal share")
