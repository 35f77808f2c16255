"""Decides which shards of a stream give how many samples to a step: they take turns, and one that has ended drops out.

So the samples of a step depend neither on the number of ranks nor on which rank reads which shard. All ranks know how
many samples each shard has at least. When a step needs more than that, the readers read on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ShardTurns:
    """The state of the shards, as all ranks know it between two steps; arrays have one element for each shard.

    Attributes:
        epoch: number of the epoch, from 0.
        turn: the shard that gives the next sample, if it has one.
        taken: samples that steps have taken in this epoch.
        known: samples that the shard is known to have in this epoch, at least.
        ended: 1 if it is known to have no others.
    """

    epoch: int
    turn: int
    taken: NDArray[np.int64]
    known: NDArray[np.int64]
    ended: NDArray[np.int64]

    @classmethod
    def begin(cls, shards: int, epoch: int = 0) -> Self:
        """Returns the beginning of an epoch, at which nothing is known."""
        return cls(epoch, 0, *np.zeros((3, shards), np.int64))

    @property
    def finished(self) -> NDArray[np.bool_]:
        """True for each shard whose samples of this epoch are known to be all taken."""
        finished: NDArray[np.bool_] = (self.ended == 1) & (self.taken == self.known)
        return finished

    @property
    def is_over(self) -> bool:
        """True if no shard has samples left in this epoch."""
        return bool(np.all(self.finished))

    def share_out(self, batch: int) -> NDArray[np.int64] | None:
        """Returns how many of the next `batch` samples each shard gives; fewer at the end of the epoch.

        None if that depends on more samples than are known.
        """
        shares = self._shares(batch)
        return None if np.any(self.taken + shares > self.known) else shares

    def wanted(self, batch: int, steps: int) -> NDArray[np.int64]:
        """Returns how many samples of each shard must be known for some steps, if none ends that is not known to end.

        Once the readers have read so far, more samples are known, or another shard is known to have ended.
        """
        turns: ShardTurns = self
        for _ in range(steps):
            if not (shares := turns._shares(batch)).any():
                break
            turns = turns.after(shares)
        return turns.taken

    def _shares(self, batch: int) -> NDArray[np.int64]:
        """Returns what each shard gives, if those that are not known to end do not end."""
        left = np.where(self.ended, self.known - self.taken, batch)
        rounds = _most(lambda number: int(np.minimum(left, number).sum()) <= batch, batch)
        shares = np.minimum(left, rounds)
        order = self._in_turn()
        more = order[left[order] > rounds][: batch - int(shares.sum())]
        shares[more] += 1
        return shares

    def after(self, shares: NDArray[np.int64]) -> ShardTurns:
        """Returns what is known after a step that takes these samples."""
        order = self._in_turn()
        last = order[shares[order] == shares.max(initial=0)][-1]  # it was the last one to have a turn
        return replace(self, turn=(int(last) + 1) % len(shares), taken=self.taken + shares)

    def learned(self, known: NDArray[np.int64], ended: NDArray[np.int64]) -> ShardTurns:
        """Returns what is known once the readers have said what their shards have."""
        return replace(self, known=np.maximum(self.known, known), ended=self.ended | ended)

    def _in_turn(self) -> NDArray[np.int64]:
        return (np.arange(len(self.taken)) + self.turn) % len(self.taken)


def _most(holds: Callable[[int], bool], limit: int) -> int:
    """Returns the largest number up to the limit for which a condition is true; from some number on it is false."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
