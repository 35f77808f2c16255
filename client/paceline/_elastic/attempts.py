"""Counts attempts: those at a step or block that failed in a row, and the blocks finished between two steps.

A failed attempt does not count if the worker that caused it has left since: if five machines are reclaimed during one
long step, the step is not at fault. A worker is identified by its process, so that a process that returns as a new
member after each failure is the same worker. Host and process id are not enough: a restarted container keeps them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import numpy as np

from paceline._group import Group
from paceline._links.base import Peer
from paceline.errors import CollectiveMismatch, PacelineError, StepVoid

MAX_ATTEMPTS = 5
"""Failures in a row, of workers that are all still present, after which another attempt is pointless."""

_Worker = tuple[str, int, int]


class FailedAttempts:
    """The failed attempts at one step or block."""

    def __init__(self) -> None:
        self._what = ""
        self._attempts = 0
        self._causes: list[tuple[str, frozenset[_Worker]]] = []
        self._mismatch = ""

    def begin(self, what: str, members: Iterable[Peer]) -> int:
        """Begins an attempt at `what`, such as "step 12"; returns its number, from 1. StepVoid after too many."""
        self._look_at(what)
        self._mismatch = ""
        present = {_worker(peer) for peer in members}
        self._causes = [(text, culprits) for text, culprits in self._causes if culprits <= present]
        if len(self._causes) >= MAX_ATTEMPTS:
            causes = "; ".join(text for text, _ in self._causes)
            raise StepVoid(f"{what} failed {len(self._causes)} times in a row: {causes}")
        return self._attempts + 1

    def add(self, what: str, cause: BaseException | None, members: Iterable[Peer]) -> None:
        """Records that an attempt has failed; a PacelineError says which of the members are to blame."""
        self._look_at(what)
        blamed = cause.ranks if isinstance(cause, PacelineError) else ()
        culprits = frozenset(_worker(peer) for peer in members if peer.rank in blamed)
        self._attempts += 1
        self._causes.append((f"{type(cause).__name__}: {cause}", culprits))
        self._mismatch = str(cause) if isinstance(cause, CollectiveMismatch) else ""

    def mismatch_in(self, what: str) -> str:
        """Returns the text of the error if calls did not match in the last attempt at `what`; else an empty text."""
        return self._mismatch if what == self._what else ""

    def _look_at(self, what: str) -> None:
        if what != self._what:
            self._what, self._attempts, self._mismatch = what, 0, ""
            self._causes.clear()


def _worker(peer: Peer) -> _Worker:
    return peer.host, peer.pid, peer.start_ticks


class BlockOutcome(enum.Enum):
    """The ways in which a block that a failure interrupted goes on."""

    AGAIN = "again"
    """It runs again."""
    PASSED = "passed"
    """Another member has finished it, so all members had reached its end."""
    OVERTAKEN = "overtaken"
    """The others went on without this member, which was admitted again at a later step: it skips the block."""


class FinishedBlocks:
    """The number of finished blocks (`session.retry`) since the last step, here and at the furthest member."""

    def __init__(self) -> None:
        self._here = self._furthest = 0

    @property
    def passed(self) -> bool:
        """True if another member has finished the block that was interrupted here: so all reached its end."""
        return self._furthest > self._here

    def done(self) -> None:
        """Counts a finished block."""
        self._here += 1

    def forget(self) -> None:
        """Starts again from zero, because a step was applied."""
        self._here = self._furthest = 0

    def compare(self, group: Group, asked: int) -> int:
        """Learns how far the furthest member is; returns the step that any asks to skip, else 0. A collective."""
        here = np.array([self._here, asked], np.int64)
        self._furthest, skipped = group.all_reduce(here, op="max", label="blocks").tolist()
        return int(skipped)
