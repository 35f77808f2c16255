"""The contract of a storage: it takes changes in order and says when they are durable. It decides nothing.

One conformance test runs over every implementation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline_protocol import Ending, Verdict, View

__all__ = [
    "Change",
    "EndingStored",
    "FinishedStored",
    "JobForgotten",
    "KeyDeleted",
    "KeySet",
    "NumbersUsed",
    "ReachedStored",
    "StateUnusable",
    "Storage",
    "StoreCleared",
    "StoredJob",
    "VerdictStored",
    "ViewFormed",
    "ViewForgotten",
]


class StateUnusable(OSError):
    """The state file cannot be opened, is none or a damaged one, or another coordinator has it; the text names it."""


@dataclass(frozen=True, slots=True)
class ViewFormed:
    """A job's new view replaces the one before; its number is used up for ever."""

    job: str
    view: View
    door_secret: bytes = field(default=b"", repr=False)
    """The job's: whoever is a member has it, also after a restart of the coordinator."""


@dataclass(frozen=True, slots=True)
class ViewForgotten:
    """The view of this generation is no more; the number stays used. Ignored if it is not the latest."""

    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class VerdictStored:
    """The view of the verdict's generation is void. Ignored if it is not the latest."""

    job: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class EndingStored:
    """A member of the view of this generation has gone. Ignored if it is not the latest."""

    job: str
    generation: int
    rank: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class FinishedStored:
    """The job's line is done after this step; None: it is not."""

    job: str
    step: int | None


@dataclass(frozen=True, slots=True)
class ReachedStored:
    """The job's line had committed so many steps, at least. Kept until another line begins."""

    job: str
    step: int


@dataclass(frozen=True, slots=True)
class KeySet:
    """A key of the job's store has a value."""

    job: str
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class KeyDeleted:
    """A key of the job's store is gone."""

    job: str
    key: str


@dataclass(frozen=True, slots=True)
class StoreCleared:
    """All keys of the job's store are gone."""

    job: str


@dataclass(frozen=True, slots=True)
class NumbersUsed:
    """Numbers up to this one are used up, by views of which nothing is kept."""

    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class JobForgotten:
    """Nothing of the job is kept, not even its number."""

    job: str


Change = (
    ViewFormed
    | ViewForgotten
    | VerdictStored
    | EndingStored
    | FinishedStored
    | ReachedStored
    | KeySet
    | KeyDeleted
    | StoreCleared
    | NumbersUsed
    | JobForgotten
)


@dataclass(slots=True)
class StoredJob:
    """A job as a storage gives it back."""

    name: str
    generation: int = 0
    """The highest number used."""
    view: View | None = None
    """The latest view, unless it was forgotten."""
    verdict: Verdict | None = None
    endings: dict[int, Ending] = field(default_factory=dict)
    finished: int | None = None
    reached: int | None = None
    """As `JobState.reached`; where there is a base, its step or more."""
    keys: dict[str, bytes] = field(default_factory=dict)
    door_secret: bytes = field(default=b"", repr=False)
    """Of the latest view, forgotten or not; empty in the file of an earlier version."""


class Storage(Protocol):
    """Where changes go. Used from one event loop."""

    async def load(self) -> list[StoredJob]:
        """Opens the storage and returns all jobs.

        Raises:
            StateUnusable: it cannot be used.
        """
        ...

    def write(self, changes: Sequence[Change]) -> asyncio.Future[None]:
        """Takes changes in, all or none, after all that was written before; never blocks.

        Returns:
            Done when they are durable. An OSError if they could not be stored; nothing of them is stored then.
        """
        ...

    async def close(self) -> None:
        """Finishes what was taken in, then lets go of everything."""
        ...
