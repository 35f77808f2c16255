"""Who saw which generation of a job when: members in their views, and commands at the coordinator."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from paceline.cli.admin import get_job
from paceline.errors import PacelineError
from support.processes import Worker

__all__ = ["LEAVES_SOCKETS", "TRAINER", "Reading", "Watchers", "going_back", "until_world", "watchers"]

TRAINER = """
with paceline.join() as session:
    model = paceline.nn.Sequential(paceline.nn.Linear(2, 2, rng=np.random.default_rng(1)))
    ddp = paceline.DDP(model, session.group)
    optimizer = paceline.optim.SGD(ddp, lr=0.01)
    state = paceline.TrainState(model=ddp, optimizer=optimizer, sampler=paceline.ElasticSampler(4, 4))
    session.on_view(lambda: emit("view", generation=session.generation, world=session.size))
    x, t = np.eye(2, dtype=np.float32), np.zeros(2, dtype=np.int64)
    for step in session.steps(state, total=10**9):
        with step:
            time.sleep(0.02)
            loss, dy = paceline.nn.softmax_cross_entropy(ddp(x), t)
            optimizer.zero_grad()
            ddp.backward(dy, step.weight)
            optimizer.step()
"""
"""What each member runs: it says which views it enters."""


LEAVES_SOCKETS = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning"
)
"""For tests with watchers: `ssl` leaves a socket to its collector if the server is killed before the handshake, which a
command tries to find out whether the server uses TLS."""


class Reading(NamedTuple):
    """Somebody saw a generation at one moment between two times; a member enters its view at once."""

    who: str
    began: float
    ended: float
    generation: int


def going_back(readings: Iterable[Reading]) -> list[tuple[Reading, Reading]]:
    """Returns each reading that is below one that had ended before it began, with that one.

    The current generation only grows, so its readings are linearizable if there is none.
    """
    found, highest = [], None
    ended = sorted(readings, key=lambda each: each.ended)
    next_of = iter(ended)
    coming = next(next_of, None)
    for reading in sorted(ended, key=lambda each: each.began):
        while coming is not None and coming.ended < reading.began:
            highest = coming if highest is None or coming.generation > highest.generation else highest
            coming = next(next_of, None)
        if highest is not None and reading.generation < highest.generation:
            found.append((highest, reading))
    return found


class Watchers:
    """Threads that ask a coordinator for a job again and again.

    Args:
        coordinator: its address, or several.
        count: how many.
        job: its name.

    Attributes:
        readings: so far.
    """

    def __init__(self, coordinator: str, count: int, job: str) -> None:
        self.readings: list[Reading] = []
        self._coordinator, self._job = coordinator, job
        self._stopped = threading.Event()
        self._highest: dict[str, int] = dict.fromkeys((f"watcher {n}" for n in range(count)), -1)
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._watch, args=(name,)) for name in self._highest]
        for thread in self._threads:
            thread.start()

    def wait_for(self, generation: int) -> None:
        """Waits until each has seen this generation, or a later one."""
        with self._changed:
            seen = self._changed.wait_for(lambda: min(self._highest.values()) >= generation, 40.0)
        assert seen, f"generation {generation} was not seen: {self._highest}"

    def close(self) -> None:
        """Stops them."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _watch(self, who: str) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                generation = get_job(self._coordinator, self._job, 1.0).summary.generation
            except PacelineError:  # nobody answers at this moment
                continue
            with self._changed:
                self.readings.append(Reading(who, began, time.monotonic(), generation))
                self._highest[who] = max(self._highest[who], generation)
                self._changed.notify_all()


@contextmanager
def watchers(coordinator: str, count: int = 2, job: str = "default") -> Iterator[Watchers]:
    """Watchers for the block."""
    started = Watchers(coordinator, count, job)
    try:
        yield started
    finally:
        started.close()


def until_world(worker: Worker, world: int, readings: list[Reading]) -> None:
    """Reads what a member says until it is in a view of so many, and notes the views."""
    while True:
        event = worker.expect_any(40.0, f"a view of {world}")
        if event["event"] != "view":
            continue
        readings.append(Reading(f"pid {worker.process.pid}", event["at"], event["at"], event["generation"]))
        if event["world"] == world:
            return
