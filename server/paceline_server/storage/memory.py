"""A storage that lives as long as its object: for a coordinator without a state file, and for tests of restarts."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence

from paceline_server.storage.base import (
    AnswerKept,
    AnswersDropped,
    Change,
    EndingStored,
    FinishedStored,
    JobForgotten,
    KeyDeleted,
    KeySet,
    NumbersUsed,
    ReachedStored,
    StoreCleared,
    StoredJob,
    VerdictStored,
    ViewForgotten,
    ViewFormed,
)

_REMOVALS = (KeyDeleted, AnswersDropped, StoreCleared)
"""Changes after which nothing may be left of a job."""


class MemoryStorage:
    """Keeps jobs in a dict. Values are immutable and shared with the coordinator, so a key is not held twice."""

    def __init__(self, jobs: dict[str, StoredJob] | None = None) -> None:
        self.jobs: dict[str, StoredJob] = {} if jobs is None else jobs

    async def load(self) -> list[StoredJob]:
        """Returns copies of all jobs."""
        return copy.deepcopy(list(self.jobs.values()))

    def write(self, changes: Sequence[Change]) -> asyncio.Future[None]:
        """Takes changes; the future is done at once, because they will never be more durable."""
        for change in changes:
            self.take(change)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def confirm(self) -> None:
        """Returns at once: nobody else has this state."""

    @property
    def is_sure(self) -> bool:
        """Always true, as `confirm` says."""
        return True

    async def close(self) -> None:
        """Does nothing: there is nothing to free."""

    def take(self, change: Change) -> None:
        """Makes one change."""
        name = change.job
        job = self.jobs.setdefault(name, StoredJob(name))
        match change:
            case ViewFormed(_, view, door_secret):
                job.generation, job.view, job.door_secret = view.generation, view, door_secret
                job.verdict, job.endings = None, {}
                job.reached = job.reached if view.base is None else view.base.step
            case ViewForgotten(_, generation):
                if generation == job.generation:
                    job.view, job.verdict, job.endings, job.door_secret = None, None, {}, b""
            case VerdictStored(_, verdict):
                if verdict.generation == job.generation and job.view is not None:
                    job.verdict = verdict
            case EndingStored(_, generation, rank, ending):
                if generation == job.generation and job.view is not None:
                    job.endings[rank] = ending
            case FinishedStored(_, step):
                job.finished = step
            case ReachedStored(_, step):
                job.reached = step
            case KeySet(_, key, value):
                job.keys[key] = value
            case KeyDeleted(_, key):
                job.keys.pop(key, None)
            case AnswerKept(_, member_id, slot, call, answer):
                job.answers.setdefault(member_id, {})[slot] = (call, answer)
            case AnswersDropped(_, member_id):
                job.answers.pop(member_id, None)
            case StoreCleared():
                job.keys.clear()
                job.answers.clear()
            case NumbersUsed(_, generation):
                job.generation = max(job.generation, generation)
            case JobForgotten():
                del self.jobs[name]
        if isinstance(change, _REMOVALS) and job == StoredJob(name):
            del self.jobs[name]
