"""Shares of a batch that follow the speeds of the workers: `session.steps(..., balance=True)`. Pure.

Each member measures how many samples it computes in a second, without the time in which it waits for others
(`MemberCounters.speed`). It says so with its step word in the first step of a generation, and in every fourth one after
it; 0 if it has measured too little since its speed was used. All members see the same words, so once that step has
passed they divide the next batches alike. A generation begins with equal shares: its members know nothing in common
yet. Shares change once two words with all speeds ask for it, since a single measurement is noisy. docs/decisions/15
says why speeds travel with the word.

A rank that takes far longer for its share than the median is a straggler. Whether it leaves is not decided here. Its
speed alone would not do: part of a step takes as long for any share, so a speed falls as the share gets smaller.

What is divided are units: the microbatches of a step, or else its samples. Each rank has one unit at least, since its
loop leads to the collectives.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from statistics import median_low

from paceline._base.shares import Shares, equal_shares
from pacelinepb.status_json import STRAGGLER_TIMES

_EVERY = 4
"""Steps between two words with speeds. Such a word is a message of its own, in parallel with the computation."""

_LEAST_GAIN = 1.1
"""How many times faster the slowest rank must become for other shares: equal machines seem to differ by less."""


class Balance:
    """The shares of the members of a group, in one generation after the other.

    Args:
        units_in: returns the units of a whole batch in a world of a given size.

    Attributes:
        shares: the units of each rank in the next step; None for equal shares.
        straggler: the rank that takes longest for its share, if the last two words call it a straggler; else None.
        took: for each rank how long it takes for its share, by the last word that was used.
    """

    def __init__(self, units_in: Callable[[int], int]) -> None:
        self.shares: Shares | None = None
        self.straggler: int | None = None
        self.took: list[float] = []
        self._units_in = units_in
        self._world = self._units = self._next = 0
        self._wanted: Shares | None = None
        """The shares that the last word has asked for."""
        self._late: frozenset[int] = frozenset()
        """The ranks that were stragglers by the last word."""

    def enter(self, world: int) -> None:
        """Begins a generation."""
        self.shares = self.straggler = self._wanted = None
        self._late = frozenset()
        self._world, self._units, self._next = world, self._units_in(world), 0

    def has_words(self, step: int) -> bool:
        """True if the members tell their speeds with the word of this step."""
        return self._world > 1 and step >= self._next

    def word(self, rank: int, speed: float) -> list[float]:
        """Returns what a member adds to its step word: the words are summed, and each fills its own place."""
        return [speed if place == rank else 0.0 for place in range(self._world)]

    def hear(self, step: int, speeds: Sequence[float]) -> bool:
        """Takes the speeds in the words of a step that all members have passed.

        Returns True if they are used: a word in which a speed is 0 changes nothing.
        """
        self.straggler = None
        self._next = step + _EVERY
        if not all(0 < speed < math.inf for speed in speeds):
            return False
        before, self._wanted = self._wanted, None
        late = self._late
        now = self.shares or equal_shares(self._units, self._world)
        took = self.took = times(now, speeds)
        bound = STRAGGLER_TIMES * median_low(took)
        self._late = frozenset(rank for rank, time in enumerate(took) if time > bound)
        self.straggler = max(late & self._late, key=lambda rank: took[rank], default=None)
        if self._units <= self._world:  # nothing can move
            return True
        found = divide(speeds, self._units)
        if _gains(took, found, speeds):
            self._wanted = found
            if before is not None and _gains(took, before, speeds):
                self.shares, self._wanted = found, None
        return True


def _gains(took: Sequence[float], shares: Shares, speeds: Sequence[float]) -> bool:
    """Returns True if other shares make the slowest rank so much faster that they are worth a change."""
    return max(took) >= _LEAST_GAIN * max(times(shares, speeds))


def times(shares: Sequence[int], speeds: Sequence[float]) -> list[float]:
    """Returns the time in which each rank computes its share."""
    return [share / speed for share, speed in zip(shares, speeds, strict=True)]


def divide(speeds: Sequence[float], units: int) -> Shares:
    """Divides at least as many units as ranks so that the slowest rank is as fast as it can be, with one unit each.

    The speeds are above 0. Equal arguments give the same shares on every machine, since all of this is exactly rounded.
    """
    total, world = math.fsum(speeds), len(speeds)  # `sum` differs between versions of Python
    # With W units held back, the ranks that are worth less than one unit do not take more than there are.
    shares = [max(1, int((units - world) * (speed / total))) for speed in speeds]
    waiting = [((share + 1) / speed, rank) for rank, (share, speed) in enumerate(zip(shares, speeds, strict=True))]
    heapq.heapify(waiting)
    for _ in range(units - sum(shares)):
        _, rank = waiting[0]
        shares[rank] += 1
        heapq.heapreplace(waiting, ((shares[rank] + 1) / speeds[rank], rank))
    return tuple(shares)
