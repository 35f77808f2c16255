"""The coordinator's disk: writes become durable in order, after a while; a crash loses those that are not yet."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline_server.storage.base import Change, StoredJob
from paceline_server.storage.memory import MemoryStorage

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["JOB", "Disk"]

JOB = "job"


class Disk:
    """Ordered, durable after a delay."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._storage = MemoryStorage()
        self._last = 0.0
        self._life = 0

    def write(self, change: Change, then: Callable[[], None] | None = None) -> None:
        """Takes a change in; `then` is called some time after it is durable, if there was no crash before."""
        slow = self._world.rng.random() < 0.1
        delay = self._world.delay(0.05, 0.5) if slow else self._world.delay(0.0005, 0.01)
        self._last = max(self._last, self._world.clock.now + delay)
        self._world.clock.at(self._last, self._apply, self._life, change)
        if then is not None:
            self._world.clock.at(self._last + self._world.delay(0.0, 0.01), self._say, self._life, then)

    def crash(self) -> None:
        """What is not durable is lost."""
        self._life += 1
        self._last = 0.0

    def lose(self) -> None:
        """All is lost."""
        self._storage = MemoryStorage()

    def load(self) -> StoredJob:
        """The job as it is stored."""
        return copy.deepcopy(self._storage._jobs.get(JOB) or StoredJob(JOB))

    def _apply(self, life: int, change: Change) -> None:
        if life == self._life:
            self._storage._apply(change)

    def _say(self, life: int, then: Callable[[], None]) -> None:
        if life == self._life:
            then()
