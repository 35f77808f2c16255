"""Hands the decisions of jobs to the storage. Only a view waits for the disk: it forms once it is stored."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline_protocol.coordinator import (
    Abandonment,
    Event,
    FinishStored,
    ForgetView,
    Membership,
    StoreEnding,
    StoreFailed,
    StoreFinished,
    StoreReached,
    StoreVerdict,
    StoreView,
    ViewStored,
)
from paceline_server.errors import NotLeader
from paceline_server.key_values import Storeroom
from paceline_server.pages import ViewPages
from paceline_server.storage.base import (
    AnswersDropped,
    Change,
    EndingStored,
    FinishedStored,
    JobForgotten,
    NumbersUsed,
    ReachedStored,
    Storage,
    StoreCleared,
    VerdictStored,
    ViewForgotten,
    ViewFormed,
)
from pacelinepb.remarks import Remarks

_log = logging.getLogger(__name__)

_REMARK_S = 10.0
"""Seconds between two lines of log about changes that could not be stored: each waiting job tries once a second."""

Kept = StoreView | ForgetView | StoreVerdict | StoreEnding | StoreFinished | StoreReached
"""The effects that the keeper performs."""


@dataclass(slots=True)
class Job:
    """One job: its membership, which decides, and what the shell needs besides."""

    membership: Membership
    store: Storeroom
    abandonment: Abandonment
    door_secret: bytes = field(repr=False)
    """The 32 bytes by which members recognise each other. New in each line; a restart of the coordinator keeps it."""
    reason: str = ""
    """The sentence of the policy that was logged last."""
    timer: asyncio.TimerHandle | None = None
    failed: bool = False
    """True if a bug has ended the job's sessions: the job decides nothing more."""
    pages: dict[int, ViewPages] = field(default_factory=dict)
    """The member lists of the last view that was pushed or requested, by position in a replica."""


class Keeper:
    """Writes to the storage for all jobs.

    `apply` gives an event to a job and raises nothing. `took` is called with the seconds that it took to store a view.
    `trouble` says why the last change could not be stored; empty if it was.
    """

    def __init__(self, storage: Storage, apply: Callable[[Job, Event], None]) -> None:
        self._storage = storage
        self._apply = apply
        self._closed = False
        self.took: Callable[[float], None] = lambda _: None
        self.trouble = ""
        self.failures = 0
        self._remarks = Remarks(_REMARK_S)

    def close(self) -> None:
        """Stops telling jobs that their writes are done."""
        self._closed = True

    def keep(self, job: Job, effect: Kept) -> None:
        """Hands a change to the storage; awaits nothing."""
        name = job.membership.state.name
        match effect:
            case StoreView(view):
                began = time.monotonic()
                written = self._write(ViewFormed(name, view, job.door_secret))
                written.add_done_callback(functools.partial(self._view_written, job, view.generation, began))
            case ForgetView(generation):
                self._write(ViewForgotten(name, generation))
            case StoreVerdict(verdict):
                _log.info("job %s: generation %d is void: %s", name, verdict.generation, verdict.text)
                self._write(VerdictStored(name, verdict))
            case StoreEnding(generation, rank, ending):
                self._write(EndingStored(name, generation, rank, ending))
            case StoreReached(step):
                self._write(ReachedStored(name, step))
            case StoreFinished(step):
                written = self._write(FinishedStored(name, step))
                written.add_done_callback(functools.partial(self._finish_written, job, step))

    def clear(self, name: str) -> None:
        """Removes all keys of a job from the storage."""
        self._write(StoreCleared(name))

    def forget(self, name: str) -> None:
        """Removes a job from the storage."""
        self._write(JobForgotten(name))

    def drop_answers(self, name: str, member_id: str) -> None:
        """Removes the answers of a member that repeats no calls any more."""
        self._write(AnswersDropped(name, member_id))

    def forget_but(self, name: str, others: str, generation: int) -> None:
        """Removes a job from the storage, but keeps with `others` that numbers up to `generation` are used up."""
        self._write(NumbersUsed(others, generation), JobForgotten(name))

    def check(self) -> asyncio.Future[None]:
        """Asks whether the storage answers, by a write of nothing new if the last change could not be stored."""
        return self._write(NumbersUsed("", 0)) if self.trouble else self._storage.write([])

    def _view_written(self, job: Job, generation: int, began: float, written: asyncio.Future[None]) -> None:
        error = written.exception()
        if error is None:
            self.took(time.monotonic() - began)
        if self._closed:
            return
        if error is None:
            self._apply(job, ViewStored(generation))
        elif not isinstance(error, NotLeader):
            self._apply(job, StoreFailed(generation, str(error)))

    def _finish_written(self, job: Job, step: int | None, written: asyncio.Future[None]) -> None:
        """Tells the job that it is done even if the disk refused the write, as no member could act on the refusal.

        If another coordinator leads, the members tell that one.
        """
        if step is not None and not self._closed and not isinstance(written.exception(), NotLeader):
            self._apply(job, FinishStored(step))

    def _write(self, *changes: Change) -> asyncio.Future[None]:
        written = self._storage.write(changes)
        written.add_done_callback(self._written)
        return written

    def _written(self, written: asyncio.Future[None]) -> None:
        if written.cancelled() or isinstance(error := written.exception(), NotLeader):
            return
        if error is None:
            self.trouble = ""
            return
        self.trouble = str(error) or type(error).__name__
        self.failures += 1
        if count := self._remarks.count("", time.monotonic()):
            _log.error("%s (changes that could not be stored since the last such line: %d)", self.trouble, count)
