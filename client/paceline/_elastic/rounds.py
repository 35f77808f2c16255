"""Rounds: how the ranks of a replica agree whether a step's block runs, and whether its state may change.

Mates must leave a block at the same line, because one that is alone in a collective of torch hangs. So in a generation
each of them posts a *word* where their ways could part, and goes on once the words of all say so: `go`. A rank that
leaves its generation for any other reason posts one more word, `stop`, and does not wait for its mates.

The n-th words of all mates form one round, and everybody sees all words of a round. Ranks hear of views one by one, so
the words of a round may be of two generations: the earlier generation is over then, and a rank of the later one posts
its word again. What is over follows from the rounds alone, so all mates that have seen the same rounds know it. Hence
no rank waits for a mate that has left: that mate's stop lies in an earlier round, or in this one.

A rank that becomes a candidate does not know whether its mates are in a generation that it never heard of. It posts
`cast out`, which ends whatever generation they are in. Its mates become candidates too, and post the same.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from paceline.errors import StepOrderError
from paceline_protocol import StepFlag

_NO_FLAGS = StepFlag(0)

_STOP, _CAST_OUT = 1, 2


class Point(enum.IntEnum):
    """The points at which mates agree; in words, what a rank does there."""

    BEGIN = 3
    UPDATE = 4
    NO_UPDATE = 5
    CLOSE = 6
    BLOCK = 7
    INSIDE = 8

    def __str__(self) -> str:
        return _POINTS[self]


_POINTS = {
    Point.BEGIN: "begins a step",
    Point.UPDATE: "makes its update",
    Point.NO_UPDATE: "ends the step's block without an update",
    Point.CLOSE: "has left the loop over the steps",
    Point.BLOCK: "ends a block of session.retry()",
    Point.INSIDE: "takes another inner step",
}


class Rounds:
    """One rank's knowledge of its mates' generations. Pure.

    A word has two numbers for each position, its generation and what it says, and one for each flag. A round is the
    greatest of each number over all words; a word has zeros where it says nothing.

    Attributes:
        generation: the latest one that this rank has entered, 0 for none.
    """

    def __init__(self, position: int, size: int) -> None:
        self.generation = 0
        self._position = position
        self._size = size
        self._over = 0  # the latest generation that is over

    @property
    def is_open(self) -> bool:
        """True while mates may go on in this rank's generation, as far as it knows."""
        return self.generation > self._over

    def enter(self, generation: int) -> None:
        """Enters a generation; the one before must have been left."""
        self.generation = max(generation, self.generation)

    def go(self, point: Point, flags: StepFlag) -> list[int]:
        """Returns the word of a rank that goes on from a point of the script if its mates do."""
        return self._word(point, flags)

    def leave(self) -> list[int] | None:
        """Leaves the generation; returns the word to post, None if no mate can wait for it."""
        if not self.is_open:
            return None
        self._over = self.generation
        return self._word(_STOP)

    def cast_out(self) -> list[int]:
        """Leaves whatever generation mates are in, as a candidate; returns the word to post."""
        self._over = max(self._over, self.generation)
        return self._word(_CAST_OUT)

    def closed(self) -> None:
        """Leaves the generation as all mates do here, after a round in which they agreed."""
        self._over = self.generation

    def hear(self, found: Sequence[int]) -> StepFlag | None:
        """Learns a round that this rank has posted a word for.

        Returns the flags of all mates if all of them go on in this rank's generation. Else None: it has to stop, or to
        post its word again if the generation is still open.

        Raises:
            StepOrderError: all go on, but from different points of the script.
        """
        words = list(zip(found[0 : 2 * self._size : 2], found[1 : 2 * self._size : 2], strict=True))
        latest = max(generation for generation, _ in words)
        stopped = max((generation for generation, says in words if says in (_STOP, _CAST_OUT)), default=0)
        out = any(says == _CAST_OUT for _, says in words)
        self._over = max(self._over, stopped, latest if out else latest - 1)
        if not self.is_open or any(generation != self.generation for generation, _ in words):
            return None
        if len({says for _, says in words}) > 1:
            ranks = "; ".join(f"rank {p} {Point(says)}" for p, (_, says) in enumerate(words))
            raise StepOrderError(f"the ranks of this replica do different things, where all must do the same: {ranks}")
        return StepFlag(sum((bit > 0) << n for n, bit in enumerate(found[2 * self._size :])))

    def _word(self, says: int, flags: StepFlag = _NO_FLAGS) -> list[int]:
        numbers = [0] * (2 * self._size)
        numbers[2 * self._position : 2 * self._position + 2] = self.generation, says
        return [*numbers, *(int(flags) >> n & 1 for n in range(len(StepFlag)))]
