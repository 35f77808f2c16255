"""The contract of a storage: it takes changes in order and says when they are durable. It decides nothing.

One conformance test runs over every implementation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline_protocol import Ending, Verdict, View


class StateUnusable(OSError):
    """The state file cannot be opened, is damaged, or belongs to another program or coordinator; the text names it."""


@dataclass(frozen=True, slots=True)
class ViewFormed:
    """A job's new view replaces the previous one; its number is used up for ever."""

    job: str
    view: View
    door_secret: bytes = field(default=b"", repr=False)
    """The job's door secret: all its members have it, and a restart of the coordinator keeps it."""


@dataclass(frozen=True, slots=True)
class ViewForgotten:
    """The view of this generation is dropped; the number stays used. Ignored if the view is not the latest."""

    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class VerdictStored:
    """The view of the verdict's generation is void. Ignored if the view is not the latest."""

    job: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class EndingStored:
    """A member of the view of this generation has gone. Ignored if the view is not the latest."""

    job: str
    generation: int
    rank: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class FinishedStored:
    """The job's line is done after this step; None: the line is not done."""

    job: str
    step: int | None


@dataclass(frozen=True, slots=True)
class ReachedStored:
    """The job's line has committed at least so many steps. Kept until another line begins; None forgets it."""

    job: str
    step: int | None


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
    """All keys of the job's store are gone, and all answers to its calls."""

    job: str


@dataclass(frozen=True, slots=True)
class AnswerKept:
    """The answer to a call that has changed a key: if the call is repeated, it must not change the key again.

    It replaces the member's earlier answer in the same slot.
    """

    job: str
    member_id: str
    slot: int
    call: int
    answer: int


@dataclass(frozen=True, slots=True)
class AnswersDropped:
    """The member repeats no call any more."""

    job: str
    member_id: str


@dataclass(frozen=True, slots=True)
class NumbersUsed:
    """Generation numbers up to this one are used up, by views of which nothing is kept."""

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
    | AnswerKept
    | AnswersDropped
    | StoreCleared
    | NumbersUsed
    | JobForgotten
)


@dataclass(slots=True)
class StoredJob:
    """A job as a storage returns it."""

    name: str
    generation: int = 0
    """The highest generation number that was used."""
    view: View | None = None
    """The latest view, unless it was forgotten."""
    verdict: Verdict | None = None
    endings: dict[int, Ending] = field(default_factory=dict)
    finished: int | None = None
    reached: int | None = None
    """As `JobState.reached`; if there is a base, its step or more."""
    keys: dict[str, bytes] = field(default_factory=dict)
    answers: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """By member and slot: the call and its answer."""
    door_secret: bytes = field(default=b"", repr=False)
    """The door secret of the latest view, forgotten or not; empty in a file of an earlier version."""


class Storage(Protocol):
    """Takes changes and keeps them. Used from one event loop."""

    async def load(self) -> list[StoredJob]:
        """Opens the storage and returns all jobs, or raises `StateUnusable`."""
        ...

    def write(self, changes: Sequence[Change]) -> asyncio.Future[None]:
        """Takes changes, all or none, after all earlier ones; never blocks.

        Returns:
            A future that is done when the changes are durable. It has an OSError if they could not be stored, or a
            `NotLeader` if another coordinator has the state now; then none of them is stored.
        """
        ...

    async def confirm(self) -> None:
        """Returns once this coordinator surely had the state after the call began; else raises `NotLeader`."""
        ...

    @property
    def is_sure(self) -> bool:
        """True if nobody else can have the state at this moment; never waits."""
        ...

    async def close(self) -> None:
        """Stores the changes that it has taken, then frees everything."""
        ...
