"""`ElasticDataLoader`: the samples of a step, fetched ahead by worker processes, while ranks come and go.

The sampler alone decides which samples a rank takes in a step (`_elastic.sampler`). This loader fetches them, by
torch's `DataLoader`, and guesses which come next: those that follow if the world stays as it is. A wrong guess is
thrown away. So fetched samples are no state, and no sample is lost or used twice by fetching (I6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, tee
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from torch.utils.data import IterableDataset

from paceline._elastic.sampler import Planned
from paceline._elastic.step import Step
from paceline.errors import SizeMismatch, StepOrderError, UnsupportedOp
from paceline.torch._fetching import Fetcher, sow

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
        UnsupportedOp: the dataset is an `IterableDataset`, whose samples have no numbers: see `ElasticStreamLoader`.
        TypeError, ValueError: `settings` has what is refused, or what torch does not accept.
    """

    def __init__(self, dataset: Any, *, num_workers: int = 0, **settings: Any) -> None:
        if isinstance(dataset, IterableDataset):
            raise UnsupportedOp(
                f"{type(dataset).__name__} is an IterableDataset: its samples have no numbers to share them out by. "
                "Give a dataset with __getitem__ and __len__, or take paceline.torch.ElasticStreamLoader"
            )
        self.dataset = dataset
        self._fetcher = Fetcher(_Samples(dataset), num_workers, settings)
        self._expected: Iterator[Planned] = iter(())
        """What the fetcher gives next and from there on."""

    def batch(self, step: Step) -> Any:
        """This rank's samples of the step, collated: a batch of as many as `step.indices` has.

        A rank without a sample gets one of weight 0, as ever. Call it once in each attempt at a step.

        Raises:
            StepOrderError: the step is over.
            SizeMismatch: the dataset has not as many samples as the sampler.
            UnsupportedOp: the training state has no sampler.
            DataWorkerLost: a worker process has died.
            Exception: what the dataset or its collation raised. Worker processes are closed then, and new ones start if
                `batch` is called again.
        """
        if step.left:
            raise StepOrderError(f"step {step.number} is over: call loader.batch(step) in its block")
        sampler = step.sampler
        if len(self.dataset) != sampler.n:
            raise SizeMismatch(f"the sampler shares out {sampler.n} samples, and the dataset has {len(self.dataset)}")
        _ = step.indices  # from now on the group counts this rank's gradients by them
        planned = sampler.ahead(step.rank, step.world)
        wanted, tasks = next(planned), None
        if not _same(wanted, next(self._expected, None)):
            self._expected, ahead = tee(planned)
            tasks = (_Task(sampler.seed, each.epoch, each.indices.tolist()) for each in chain([wanted], ahead))
        try:
            return self._fetcher.next(step.rank, tasks)
        except BaseException:
            self._expected = iter(())  # nothing is ahead any more
            raise

    def close(self) -> None:
        """Ends the worker processes. Idempotent; `batch` starts new ones."""
        self._expected = iter(())
        self._fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Task(NamedTuple):
    """What is to be fetched for one step."""

    seed: int
    """The sampler's."""
    epoch: int
    indices: list[int]


class _Samples:
    """Fetches samples from the user's dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def fetch(self, task: _Task, check: Callable[[], None]) -> Any:
        """See `SampleSource`."""
        at_once = getattr(self._dataset, "__getitems__", None)
        if callable(at_once):
            sow(task.seed, task.epoch, task.indices[0])
            return at_once(task.indices)
        samples = []
        for index in task.indices:
            check()
            sow(task.seed, task.epoch, index)
            samples.append(self._dataset[index])
        return samples


def _same(a: Planned, b: Planned | None) -> bool:
    return b is not None and a[:2] == b[:2] and np.array_equal(a.indices, b.indices)
