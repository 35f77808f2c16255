"""Fetches samples ahead of their step, here or in worker processes, and drops them when others are wanted.

`ElasticDataLoader` and `ElasticStreamLoader` share this module. torch's `DataLoader` does the work; its batch sampler
is a plan that can be replaced. Fetched samples are not part of the training state: another plan may begin at any time.
"""

from __future__ import annotations

import random
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from paceline.errors import DataWorkerLost


class SampleSource(Protocol):
    """Fetches samples. Worker processes have a copy of the source."""

    def fetch(self, task: Any, check: Callable[[], None]) -> Any:
        """Carries out one task of a plan.

        `check` is called between samples; it raises if the task is not wanted any more.
        """


class Fetcher:
    """Carries out a plan of tasks in order, ahead of time if there are worker processes.

    The worker processes start here, and live until `close`; without any, this process fetches on demand. The settings
    are further arguments of `torch.utils.data.DataLoader`, and its errors are raised.
    """

    def __init__(self, source: SampleSource, num_workers: int, settings: Mapping[str, Any]) -> None:
        self._source = source
        self._workers = num_workers
        self._settings = settings
        self._plan = _TaskPlan(shared=num_workers > 0)
        self._loader: Any = None
        """torch's `DataLoader`; None when closed."""
        self._results: Any = None
        """The loader's iterator, which owns the worker processes."""
        self._begin(iter(()))

    def next(self, rank: int, tasks: Iterator[Any] | None = None) -> Any:
        """Returns the result of the next task; with `tasks`, of another plan, which begins now.

        After any error, including Ctrl-C, worker processes are closed, because torch's queues may be half read. New
        ones start with the next plan.

        Raises:
            DataWorkerLost: a worker process has died.
        """
        try:
            if tasks is not None:
                self._begin(tasks)
            return next(self._results)
        except BaseException as error:
            dead = self._dead() if isinstance(error, RuntimeError) else ""
            self.close()
            if dead:
                raise DataWorkerLost(
                    f"rank {rank} on {socket.gethostname()}: {dead}. If it was killed because memory ran out, fetch "
                    "less ahead (prefetch_factor). With num_workers=0 you see errors of the dataset itself",
                    ranks=(rank,),
                ) from error
            raise

    def close(self) -> None:
        """Ends the worker processes. Idempotent."""
        results, self._results, self._loader = self._results, None, None
        if self._workers and results is not None:
            results._shutdown_workers()  # `__del__` does so too, but only when no traceback holds the iterator

    def _begin(self, tasks: Iterator[Any]) -> None:
        self._plan.begin(tasks)
        if self._loader is None:
            self._loader = DataLoader(
                _Fetching(self._source, self._plan.round),
                batch_sampler=self._plan,
                num_workers=self._workers,
                persistent_workers=self._workers > 0,
                generator=torch.Generator(),  # without it torch draws from the training process's generator
                in_order=True,
                **self._settings,
            )
        self._results = iter(self._loader)

    def _dead(self) -> str:
        """Describes the worker processes that have died; empty if all are alive."""
        gone = [worker for worker in getattr(self._results, "_workers", ()) if not worker.is_alive()]
        return ", ".join(f"process {worker.pid}, which fetches data, {_end(worker.exitcode)}" for worker in gone)


def sow(*numbers: int) -> None:
    """Seeds the generators that transforms draw from: Python's, NumPy's and torch's on the CPU."""
    words = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.default_generator.manual_seed(int(words[2]))  # torch.manual_seed would seed devices too


class _TaskPlan:
    """The plan of tasks; takes the place of torch's batch sampler.

    `round` is the number of plans begun so far, one element; in shared memory if there are worker processes.
    """

    def __init__(self, *, shared: bool) -> None:
        self.round = torch.zeros((), dtype=torch.int64)
        if shared:
            self.round.share_memory_()
        self._tasks: Iterator[Any] = iter(())

    def begin(self, tasks: Iterator[Any]) -> None:
        """Begins another plan; workers skip the rest of the plan before."""
        self._tasks = tasks
        self.round += 1

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        number = int(self.round)
        for task in self._tasks:
            yield number, task


class _Fetching:
    """The source of samples; takes the place of torch's dataset, and shares `round` with the `_TaskPlan`."""

    def __init__(self, source: SampleSource, round: Any) -> None:
        self._source = source
        self._round = round

    def __getitems__(self, planned: tuple[int, Any]) -> Any:
        """Returns the result of a task; torch calls this with the value that its batch sampler gave."""
        number, task = planned

        def check() -> None:
            if number != int(self._round):
                raise _Outdated  # torch removes this result from the queue before the new plan begins

        if get_worker_info() is not None:
            return self._source.fetch(task, check)
        python, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return self._source.fetch(task, check)
        finally:
            random.setstate(python)
            np.random.set_state(numpys)
            torch.set_rng_state(torchs)


class _Outdated(Exception):
    """Another plan has begun: this result is not wanted any more."""


def _end(code: int | None) -> str:
    """Describes how a process ended, from its exit code in the sense of `multiprocessing`."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
