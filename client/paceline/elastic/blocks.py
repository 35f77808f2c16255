"""How many blocks between two steps (`session.retry`) are through, here and at whoever is furthest."""

from __future__ import annotations

import enum

import numpy as np

from paceline.group import Group

__all__ = ["Blocks", "Outcome"]


class Outcome(enum.Enum):
    """What is to become of a block that was cut short."""

    AGAIN = "again"
    """It runs again."""
    PASSED = "passed"
    """Another member has got through it: then all were at its end."""
    OVERTAKEN = "overtaken"
    """The line has gone on without this member, and took it in again at a later step."""


class Blocks:
    """Those since the last step."""

    def __init__(self) -> None:
        self._here = self._furthest = 0

    @property
    def passed(self) -> bool:
        """True if another member has got through the block that was cut short here: then all were at its end."""
        return self._furthest > self._here

    def done(self) -> None:
        """A block is through."""
        self._here += 1

    def forget(self) -> None:
        """A step counts: there are none since."""
        self._here = self._furthest = 0

    def compare(self, group: Group) -> None:
        """Members that begin anew between two steps may have got through different numbers of them. A collective.

        Raises:
            PacelineError: the generation has failed.
        """
        self._furthest = int(group.all_reduce(np.int64(self._here), op="max", label="blocks"))
