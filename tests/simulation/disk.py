"""The coordinator's disk: writes become durable in order, after a while; a crash loses those that are not yet.

It may refuse for a while, lose all, or be put back to an older copy.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline_server.storage.base import Change, StoredJob
from paceline_server.storage.memory import MemoryStorage

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["JOB", "Disk", "DiskStorage"]

JOB = "job"


class Disk:
    """Ordered, durable after a delay.

    Attributes:
        refuses_until: no write succeeds before.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._storage = MemoryStorage()
        self._done: list[Change] = []
        self._last = 0.0
        self._life = 0
        self.refuses_until = 0.0

    def write(self, changes: Sequence[Change], then: Callable[[OSError | None], None]) -> None:
        """Takes changes in; `then` is called some time after they are durable, or are not, if there was no crash."""
        world = self._world
        slow = world.rng.random() < 0.1
        delay = world.delay(0.05, 0.5) if slow else world.delay(0.0005, 0.01)
        self._last = max(self._last, world.clock.now + delay)
        world.clock.at(self._last, self._apply, self._life, changes, then)

    def crash(self) -> None:
        """What is not durable is lost."""
        self._life += 1
        self._last = 0.0

    def lose(self) -> None:
        """All is lost."""
        self._put_back([])

    def go_back(self, changes: int) -> None:
        """An older copy is put in its place, which lacks the last changes."""
        self._put_back(self._done[: max(0, len(self._done) - changes)])

    def load(self) -> StoredJob:
        """The job as it is stored."""
        return copy.deepcopy(self._storage.jobs.get(JOB) or StoredJob(JOB))

    def _put_back(self, done: list[Change]) -> None:
        self._storage, self._done = MemoryStorage(), list(done)
        for change in done:
            self._storage.take(change)

    def _apply(self, life: int, changes: Sequence[Change], then: Callable[[OSError | None], None]) -> None:
        if life != self._life:
            return
        world = self._world
        if world.clock.now < self.refuses_until:
            world.clock.after(world.delay(0.0, 0.01), self._say, life, then, OSError("the disk is full"))
            return
        for change in changes:
            self._storage.take(change)
            self._done.append(change)
        world.clock.after(world.delay(0.0, 0.01), self._say, life, then, None)

    def _say(self, life: int, then: Callable[[OSError | None], None], error: OSError | None) -> None:
        if life == self._life:
            then(error)


class DiskStorage:
    """The storage of one coordinator process on that disk (`paceline_server.storage.base.Storage`).

    Args:
        disk: where.
        hear: takes in what the disk says.
    """

    def __init__(self, disk: Disk, hear: Callable[..., None]) -> None:
        self._disk = disk
        self._hear = hear

    async def load(self) -> list[StoredJob]:
        """The job, if there is one."""
        stored = self._disk.load()
        return [stored] if stored != StoredJob(JOB) else []

    def write(self, changes: Sequence[Change]) -> asyncio.Future[None]:
        """See `Storage.write`."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def told(error: OSError | None) -> None:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self._disk.write(changes, lambda error: self._hear(told, error))
        return done

    async def close(self) -> None:
        """Nothing to let go of."""
