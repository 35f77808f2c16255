"""Division of the samples or microbatches of a step into one contiguous part for each rank. Pure."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TypeAlias

Shares: TypeAlias = tuple[int, ...]
"""The units of each rank in a whole batch, at least one each; None in place of them stands for equal shares."""


def range_of(rank: int, world: int, size: int, shares: Shares | None = None) -> tuple[int, int]:
    """Returns a rank's range of `size` items, as (lo, hi): it has the items lo to hi - 1.

    With at least as many items as ranks, or as units in `shares`, each rank has at least one.
    """
    if shares is None:
        return rank * size // world, (rank + 1) * size // world
    total, before = sum(shares), sum(shares[:rank])
    return before * size // total, (before + shares[rank]) * size // total


def ranges_of(world: int, size: int, shares: Shares | None = None) -> list[tuple[int, int]]:
    """Returns the range of each rank, as `range_of` does."""
    if shares is None:
        return [range_of(rank, world, size) for rank in range(world)]
    total = sum(shares)
    return list(pairwise(before * size // total for before in accumulate(shares, initial=0)))


def equal_shares(units: int, world: int) -> Shares:
    """Returns how many units each rank has if all have equally many, or one more."""
    return tuple(hi - lo for lo, hi in ranges_of(world, units))
