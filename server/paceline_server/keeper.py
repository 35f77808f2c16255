"""Has the storage keep what a job has decided. Nobody waits, but for a view: that forms once it is stored."""

from __future__ import annotations

import asyncio
import functools
import logging
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
from paceline_server.key_values import Storeroom
from paceline_server.pages import ViewPages
from paceline_server.storage.base import (
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

__all__ = ["Job", "Keeper"]

_log = logging.getLogger(__name__)

Kept = StoreView | ForgetView | StoreVerdict | StoreEnding | StoreFinished | StoreReached
"""Effects that are performed here."""


@dataclass(slots=True)
class Job:
    """One job: what decides about it, and what the shell needs beside."""

    membership: Membership
    store: Storeroom
    abandonment: Abandonment
    door_secret: bytes = field(repr=False)
    """By which its members know each other, 32 bytes. New in each line; the same after a restart of the coordinator."""
    reason: str = ""
    """The policy's sentence as it was last logged."""
    timer: asyncio.TimerHandle | None = None
    failed: bool = False
    """A bug has ended its sessions: nothing is decided about it any more."""
    pages: ViewPages | None = None
    """The member list of the last view that was pushed or asked for."""


class Keeper:
    """Writes for all jobs.

    Args:
        storage: what outlives the process.
        apply: gives an event to a job and performs what follows; raises nothing.
    """

    def __init__(self, storage: Storage, apply: Callable[[Job, Event], None]) -> None:
        self._storage = storage
        self._apply = apply
        self._closed = False

    def close(self) -> None:
        """Jobs are not told any more of what is written."""
        self._closed = True

    def keep(self, job: Job, effect: Kept) -> None:
        """Hands a change to the storage; awaits nothing."""
        name = job.membership.state.name
        match effect:
            case StoreView(view):
                written = self._storage.write([ViewFormed(name, view, job.door_secret)])
                written.add_done_callback(functools.partial(self._view_written, job, view.generation))
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
                written = self._storage.write([FinishedStored(name, step)])
                written.add_done_callback(functools.partial(self._finish_written, job, step))

    def clear(self, name: str) -> None:
        """Nothing is left of this job's keys."""
        self._write(StoreCleared(name))

    def forget(self, name: str) -> None:
        """Nothing is left of this job."""
        self._write(JobForgotten(name))

    def forget_but(self, name: str, others: str, generation: int) -> None:
        """Nothing is left of this job but that numbers up to this one are used up, which is kept with `others`."""
        self._write(NumbersUsed(others, generation), JobForgotten(name))

    def _view_written(self, job: Job, generation: int, written: asyncio.Future[None]) -> None:
        error = written.exception()
        if self._closed:
            return
        if error is None:
            self._apply(job, ViewStored(generation))
        else:
            _log.error("%s", error)
            self._apply(job, StoreFailed(generation, str(error)))

    def _finish_written(self, job: Job, step: int | None, written: asyncio.Future[None]) -> None:
        """Of a disk that refuses nobody has any use: the job is done, and that is told."""
        _log_failure(written)
        if step is not None and not self._closed:
            self._apply(job, FinishStored(step))

    def _write(self, *changes: Change) -> None:
        self._storage.write(changes).add_done_callback(_log_failure)


def _log_failure(written: asyncio.Future[None]) -> None:
    if not written.cancelled() and (error := written.exception()) is not None:
        _log.error("%s", error)
