"""`ElasticDataLoader`: worker processes fetch the samples of steps ahead of time, while ranks come and go.

Only the sampler decides which samples a rank takes in a step (`_elastic.sampler`). This loader fetches them with
torch's `DataLoader`, and guesses which come next: those that follow if the world does not change. A wrong guess is
thrown away. So fetched samples are not state, and fetching neither loses a sample nor uses it twice (I6).
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
from paceline._microbatch.microbatch import Microbatch
from paceline.errors import SizeMismatch, StepOrderError, UnsupportedOp
from paceline.torch._fetching import Fetcher, sow


class ElasticDataLoader:
    """Fetches each step's samples from a map-style dataset; with worker processes, ahead of time.

        sampler = paceline.ElasticSampler(len(dataset), global_batch=256)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        with paceline.torch.ElasticDataLoader(dataset, num_workers=2) as loader:
            for step in session.steps(state, total=1000):
                with step:
                    x, t = loader.batch(step)
                    ...

    The sampler of the `TrainState` decides which samples this rank takes; it has the order of each epoch and the size
    of the global batch, which the ranks share out. Its position is part of the state, and moves when a step is
    committed. So each sample of an epoch counts once, even if workers die, freeze, join or leave. Samples that worker
    processes have fetched ahead are not state: when the ranks change, or a step is repeated, they are thrown away and
    fetched again. So a sample may be *read* more than once, and one that is read may never count.

    Random transforms depend only on the sampler's seed, the epoch and the sample: before each sample these three seed
    Python's `random`, `numpy.random` and torch's generator for the CPU. So a run with other workers, or with failures,
    sees the same samples. The generators of the training process are left as they are. A dataset with `__getitems__`
    gets all of a rank's indices in one call, for which the first of them gives the seed.

    Worker processes start here, and live until `close` or the end of the `with` block. On Linux torch forks them: make
    the loader before `paceline.join()`, so that they do not inherit the session's threads and memory.

    Args:
        dataset: a dataset with `__getitem__` and `__len__`, and as many samples as the sampler.
        num_workers: number of processes that fetch. With 0 the training process fetches, when `batch` is called.
        settings: further arguments of `torch.utils.data.DataLoader`: `collate_fn`, `prefetch_factor` (batches of each
            worker, 2 by default), `timeout` (seconds that `batch` waits), `worker_init_fn`, `multiprocessing_context`,
            `pin_memory`. The sampler decides which samples make up a batch, so `batch_size`, `shuffle`, `sampler`,
            `batch_sampler`, `drop_last` and `generator` are refused.

    Raises:
        UnsupportedOp: the dataset is an `IterableDataset`, whose samples have no numbers: see `ElasticStreamLoader`.
        TypeError, ValueError: `settings` has an argument that is refused, or that torch does not accept.
    """

    def __init__(self, dataset: Any, *, num_workers: int = 0, **settings: Any) -> None:
        if isinstance(dataset, IterableDataset):
            raise UnsupportedOp(
                f"{type(dataset).__name__} is an IterableDataset, so its samples have no numbers by which workers "
                "could divide them. Pass a dataset with __getitem__ and __len__, or use "
                "paceline.torch.ElasticStreamLoader"
            )
        self.dataset = dataset
        self._fetcher = Fetcher(_Samples(dataset), num_workers, settings)
        self._expected: Iterator[Planned] = iter(())
        """The tasks that the fetcher carries out from now on."""

    def batch(self, step: Step | Microbatch) -> Any:
        """Returns this rank's samples of the step, collated: a batch of the size of `step.indices`.

        A rank without a sample gets one of weight 0, as always. Call this once in each attempt at a step; if the
        sampler has microbatches, once for each, as `batch(micro)`.

        Raises:
            StepOrderError: the step is over.
            SizeMismatch: the dataset and the sampler have different numbers of samples.
            UnsupportedOp: the training state has no sampler.
            DataWorkerLost: a worker process has died.
            Exception: the dataset or its collation raised it. Worker processes are then closed, and new ones start if
                `batch` is called again.
        """
        at = step.step if isinstance(step, Microbatch) else step
        if at.left:
            raise StepOrderError(f"step {at.number} is over: call loader.batch(step) in its block")
        sampler = at.sampler
        if sampler.order is None and len(self.dataset) != sampler.n:
            raise SizeMismatch(f"the sampler divides {sampler.n} samples, but the dataset has {len(self.dataset)}")
        if isinstance(step, Microbatch):
            planned = step.ahead()
        else:
            _ = step.indices  # from now on they give the weight of this rank's gradients
            planned = sampler.ahead(step.rank, step.world, step.shares)
        wanted, tasks = next(planned), None
        if not _same(wanted, next(self._expected, None)):
            self._expected, ahead = tee(planned)
            tasks = (_Task(sampler.seed, each.epoch, each.indices.tolist()) for each in chain([wanted], ahead))
        try:
            return self._fetcher.next(at.rank, tasks)
        except BaseException:
            self._expected = iter(())  # nothing is fetched ahead now
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
    """The samples to fetch for one step."""

    seed: int
    """The sampler's seed."""
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
