"""Counts the finished blocks between two steps (`session.retry`), of this member and of the furthest one."""

from __future__ import annotations

import enum

import numpy as np

from paceline.group import Group

__all__ = ["Blocks", "Outcome"]


class Outcome(enum.Enum):
    """What happens to a block that a failure interrupted."""

    AGAIN = "again"
    """It runs again."""
    PASSED = "passed"
    """Another member has finished it, so all members had reached its end."""
    OVERTAKEN = "overtaken"
    """The others went on without this member, which was admitted again at a later step: it skips the block."""


class Blocks:
    """The number of blocks that were finished since the last step."""

    def __init__(self) -> None:
        self._here = self._furthest = 0

    @property
    def passed(self) -> bool:
        """True if another member has finished the block that was interrupted here: so all had reached its end."""
        return self._furthest > self._here

    def done(self) -> None:
        """Counts a finished block."""
        self._here += 1

    def forget(self) -> None:
        """Starts again from zero, because a step was applied."""
        self._here = self._furthest = 0

    def compare(self, group: Group) -> None:
        """Learns how many blocks the furthest member has finished, at the begin of a generation. A collective.

        Raises:
            PacelineError: the generation has failed.
        """
        self._furthest = int(group.all_reduce(np.int64(self._here), op="max", label="blocks"))
