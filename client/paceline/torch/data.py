"""`ElasticDataLoader`: the samples of a step, fetched ahead by worker processes, while ranks come and go.

Which samples a rank takes in a step is the sampler's to say (`elastic.sampler`), and nobody else's. This loader fetches
them, by torch's `DataLoader`, and guesses which come next: those that follow if the world stays as it is. A guess that
turns out wrong is thrown away. So what has been fetched is no state, and no sample is lost or used twice by it (I6).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.elastic.sampler import Planned
from paceline.elastic.step import Step
from paceline.errors import SizeMismatch, StepOrderError, UnsupportedOp

__all__ = ["ElasticDataLoader"]


class ElasticDataLoader:
    """Fetches each step's samples from a map-style dataset; with worker processes, ahead of time.

        sampler = paceline.ElasticSampler(len(dataset), global_batch=256)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        with paceline.torch.ElasticDataLoader(dataset, num_workers=2) as loader:
            for step in session.steps(state, total=1000):
                with step:
                    x, t = loader.batch(step)
                    ...

    The sampler of the `TrainState` says which samples this rank takes, and has the order of each epoch and the size of
    the global batch, which the ranks share. Its position is part of the state, and moves when a step counts. So each
    sample of an epoch counts once, whoever dies, freezes, joins or leaves. What workers have fetched ahead is no state:
    when the ranks change, or a step is redone, it is thrown away and fetched anew. A sample may be *read* more than
    once, and one that is read may never count.

    Random transforms depend on the sampler's seed, the epoch and the sample, and on nothing else: before each sample
    Python's `random`, `numpy.random` and torch's generator for the CPU are seeded by these three. So a run with other
    workers, or disturbed, sees the same samples. The generators of the training process are left as they are. A dataset
    with `__getitems__` gets all indices of its share in one call, and is seeded once for it, by the first.

    Worker processes start here, and live until `close`, or the end of the `with` block. On Linux they are forked, as
    torch has it: make the loader before `paceline.join()`, and they begin without the session's threads and memory.

    Args:
        dataset: has `__getitem__` and `__len__`, and as many samples as the sampler.
        num_workers: processes that fetch. With 0 the training process does, when `batch` is called.
        settings: further arguments of `torch.utils.data.DataLoader`: `collate_fn`, `prefetch_factor` (batches of each
            worker, 2 by default), `timeout` (seconds that `batch` waits), `worker_init_fn`, `multiprocessing_context`,
            `pin_memory`. Which samples make up a batch is the sampler's: `batch_size`, `shuffle`, `sampler`,
            `batch_sampler`, `drop_last` and `generator` are refused.

    Raises:
        UnsupportedOp: the dataset is an `IterableDataset`: no rank can take a share of it without reading all.
        TypeError, ValueError: `settings` has what is refused, or what torch does not accept.
    """

    def __init__(self, dataset: Any, *, num_workers: int = 0, **settings: Any) -> None:
        if isinstance(dataset, IterableDataset):
            raise UnsupportedOp(
                f"{type(dataset).__name__} is an IterableDataset: its samples have no numbers to share them out by. "
                "Give a dataset with __getitem__ and __len__"
            )
        self.dataset = dataset
        self._workers = num_workers
        self._settings = settings
        self._plan = _Plan(shared=num_workers > 0)
        self._loader: Any = None
        """Torch's; None when closed."""
        self._batches: Any = None
        """Its iterator, which has the worker processes."""
        self._expected: Iterator[Planned] = iter(())
        """What `_batches` gives next and from there on."""
        self._follow(iter(()), seed=0)

    def batch(self, step: Step) -> Any:
        """This rank's samples of the step, collated: a batch of as many as `step.indices` has.

        A rank without a sample gets one of weight 0, as ever. Call it once in each attempt at a step.

        Raises:
            StepOrderError: the step is over.
            SizeMismatch: the dataset has not as many samples as the sampler.
            UnsupportedOp: the training state has no sampler.
            Exception: what the dataset or its collation raised. Worker processes are closed then, and new ones start if
                `batch` is called again.
        """
        if step.left:
            raise StepOrderError(f"step {step.number} is over: call loader.batch(step) in its block")
        sampler = step.sampler
        if len(self.dataset) != sampler.n:
            raise SizeMismatch(f"the sampler shares out {sampler.n} samples, and the dataset has {len(self.dataset)}")
        _ = step.indices  # from now on the group counts this rank's gradients by them
        wanted = next(sampler.ahead(step.rank, step.world))
        if not _same(wanted, next(self._expected, None)):
            self._follow(sampler.ahead(step.rank, step.world), sampler.seed)
            self._expected = sampler.ahead(step.rank, step.world)
            next(self._expected)
        with self._closing_on_error():
            return next(self._batches)

    def close(self) -> None:
        """Ends the worker processes. Idempotent; `batch` starts new ones."""
        batches, self._batches, self._loader = self._batches, None, None
        self._expected = iter(())
        if self._workers and batches is not None:
            batches._shutdown_workers()  # what its `__del__` does, once no traceback holds it any more

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow(self, planned: Iterator[Planned], seed: int) -> None:
        """Has `_batches` begin with these, and throws away what was fetched of others."""
        self._plan.begin(planned, seed)
        with self._closing_on_error():
            if self._loader is None:
                self._loader = DataLoader(
                    _Samples(self.dataset, self._plan.round),
                    batch_sampler=self._plan,
                    num_workers=self._workers,
                    persistent_workers=self._workers > 0,
                    generator=torch.Generator(),  # else torch draws from the training process's own
                    in_order=True,
                    **self._settings,
                )
            self._batches = iter(self._loader)

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """An error, or Ctrl-C, may leave torch's queues half read: nothing goes on from there."""
        try:
            yield
        except BaseException:
            self.close()
            raise


class _Task(NamedTuple):
    """What a worker process is to fetch."""

    round: int
    seed: int
    """The sampler's."""
    epoch: int
    indices: list[int]


class _Plan:
    """What is fetched, in the place of torch's batch sampler.

    Attributes:
        round: how often another plan was begun, one element; in memory that worker processes share if there are any.
    """

    def __init__(self, *, shared: bool) -> None:
        self.round = torch.zeros((), dtype=torch.int64)
        if shared:
            self.round.share_memory_()
        self._planned: Iterator[Planned] = iter(())
        self._seed = 0

    def begin(self, planned: Iterator[Planned], seed: int) -> None:
        """What is fetched from now on; workers skip what is left of the plan before."""
        self._planned, self._seed = planned, seed
        self.round += 1

    def __iter__(self) -> Iterator[_Task]:
        number = int(self.round)
        for planned in self._planned:
            yield _Task(number, self._seed, planned.epoch, planned.indices.tolist())


class _Samples:
    """The dataset as workers see it.

    Args:
        dataset: the user's.
        round: see `_Plan`.
    """

    def __init__(self, dataset: Any, round: Any) -> None:
        self.dataset = dataset
        self._round = round

    def __getitems__(self, task: _Task) -> Any:
        """The samples of a task; torch calls it so, with what its batch sampler gave."""
        if get_worker_info() is not None:
            return self._fetch(task)
        python, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return self._fetch(task)
        finally:
            random.setstate(python)
            np.random.set_state(numpys)
            torch.set_rng_state(torchs)

    def _fetch(self, task: _Task) -> Any:
        at_once = getattr(self.dataset, "__getitems__", None)
        if callable(at_once):
            _sow(task, task.indices[0])
            return at_once(task.indices)
        samples = []
        for index in task.indices:
            if task.round != int(self._round):
                raise _Outdated  # its place in torch's queue is emptied before the new plan begins
            _sow(task, index)
            samples.append(self.dataset[index])
        return samples


class _Outdated(Exception):
    """Another plan has begun: nobody waits for this batch."""


def _sow(task: _Task, index: int) -> None:
    """Seeds the generators that transforms draw from."""
    words = np.random.SeedSequence([task.seed, task.epoch, index]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.default_generator.manual_seed(int(words[2]))  # not torch.manual_seed, which takes note for devices too


def _same(a: Planned, b: Planned | None) -> bool:
    return b is not None and a[:2] == b[:2] and np.array_equal(a.indices, b.indices)
