"""`ElasticBatches`: the batches of torch's `DataLoader`, in its order; each worker takes some rows of each.

A step has `per_step` batches, whose gradients accumulate. Ranks take contiguous parts of the samples of a step
(`_elastic.sampler`), so the samples of its batches are interleaved first: then each rank's part has its share of every
batch, in a world of any size. The number of the batch goes with each sample, so that its rows find together again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch.utils.data import IterableDataset

from paceline._elastic.sampler import ElasticSampler
from paceline._elastic.step import Step
from paceline.errors import UnsupportedOp
from paceline.torch._data_loader import ElasticDataLoader


class BatchPart(NamedTuple):
    """This rank's part of a batch.

    Attributes:
        number: number of the batch in its step, from 0.
        batch: the rank's rows of it, collated; those of another batch, or a sample, if it has none.
        rows: number of this rank's rows, 0 if it has none.
        of: number of rows of the whole batch.
        scale: factor for the mean loss over `batch`. With it, gradients that are averaged by `step.weight` are those of
            the sum over the step's batches, each with the mean loss over all of its rows.
    """

    number: int
    batch: Any
    rows: int
    of: int
    scale: float


class ElasticBatches:
    """The batches of a `DataLoader` for the steps of a session: the ranks share out the rows of each.

        batches = paceline.torch.ElasticBatches(loader, per_step=4)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=batches.sampler)
        with batches, paceline.join() as session:
            replicated = paceline.torch.replicate(model, session)
            for step in session.steps(state, total=1000):
                with step:
                    optimizer.zero_grad()
                    with replicated.no_sync():
                        for part in batches.parts(step):
                            (loss_of(part.batch) * part.scale / 4).backward()
                    replicated.sync_gradients()
                    optimizer.step()

    It is for code that is given a loader, as trainers are. The samples, their order and the collator are the loader's.
    A sampler that draws from torch's generator, as with `shuffle=True`, finds it seeded with `seed` and the epoch; one
    with `set_epoch` is told the epoch. Random transforms depend on the sample, as in `ElasticDataLoader`.

    Make it before `paceline.join()`; worker processes, as many as the loader's, live from `open` to `close`.

    Args:
        loader: a `DataLoader` of a dataset with `__getitem__` and `__len__`, whose batches have one size but for the
            last. It is not iterated.
        per_step: batches of a step. The last step of an epoch may have fewer.
        seed: seed of samplers that draw from torch's generator; the same on every rank.
        limit: batches of an epoch; None for all of the loader's.

    Attributes:
        loader: as above.
        rows: number of samples in each batch but the last.
        sampler: the `ElasticSampler` for the `TrainState`.

    Raises:
        UnsupportedOp: the loader has a stream, or no batches; its sampler gives another order each time; or its batches
            have different sizes.
        ValueError: `per_step` or `limit` is below 1.
    """

    def __init__(self, loader: Any, per_step: int = 1, seed: int = 0, limit: int | None = None) -> None:
        name = type(getattr(loader, "dataset", loader)).__name__
        if getattr(loader, "batch_sampler", None) is None or isinstance(loader.dataset, IterableDataset):
            raise UnsupportedOp(
                f"samples are shared out by their numbers, which a loader of {name} does not have: give a DataLoader "
                "with batches, of a dataset with __getitem__ and __len__"
            )
        if per_step < 1 or (limit is not None and limit < 1):
            raise ValueError(f"per_step and limit must be at least 1, not {per_step} and {limit}")
        self.loader = loader
        self._per_step, self._seed, self._limit = per_step, seed, limit
        listed = self._listed(0)
        if listed != self._listed(0):
            raise UnsupportedOp(
                f"the sampler of {name} gives another order each time, so workers would not agree: let it depend on "
                "set_epoch(epoch), and give it no generator of its own"
            )
        sizes = [len(batch) for batch in listed]
        if not sizes or set(sizes[:-1]) - {sizes[0]} or sizes[-1] > sizes[0]:
            raise UnsupportedOp(f"batches must have one size but for the last, and those of {name} have others")
        self.rows, self._count = sizes[0], len(sizes)
        self.sampler = ElasticSampler(sum(sizes), self.rows * per_step, seed, order=self._order)
        self._fetching: ElasticDataLoader | None = None

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return self._count

    def open(self) -> Self:
        """Starts the worker processes, as many as the loader has. Idempotent; `parts` opens too."""
        if self._fetching is None:
            loader = self.loader
            workers = {
                "prefetch_factor": loader.prefetch_factor,
                "multiprocessing_context": loader.multiprocessing_context,
                "timeout": loader.timeout,
                "worker_init_fn": loader.worker_init_fn,
            }
            self._fetching = ElasticDataLoader(
                _Numbered(loader.dataset, self._per_step),
                num_workers=loader.num_workers,
                collate_fn=_Collator(loader.collate_fn),
                pin_memory=loader.pin_memory and torch.cuda.is_available(),
                **(workers if loader.num_workers else {}),
            )
        return self

    def parts(self, step: Step) -> list[BatchPart]:
        """Returns this rank's part of each batch of the step, in order. Call it once in each attempt, in the block.

        Raises:
            StepOrderError: the step is over.
            DataWorkerLost: a worker process has died.
            Exception: the dataset or the collator raised it.
        """
        self.open()
        assert self._fetching is not None
        found: dict[int, tuple[int, Any]] = self._fetching.batch(step)
        left = self.sampler.n - self.sampler.offset
        sizes = [self.rows] * min(self._per_step, left // self.rows)
        if len(sizes) < self._per_step and left % self.rows:
            sizes.append(left % self.rows)
        (some, *_), weight = found.values(), step.weight
        parts = []
        for number, of in enumerate(sizes):
            rows, batch = found[number] if number in found else (0, copy.deepcopy(some[1]))
            if not weight:  # this rank has got a sample that counts for nothing
                rows = 0
            parts.append(BatchPart(number, batch, rows, of, rows / of / weight if rows else 0.0))
        return parts

    def close(self) -> None:
        """Ends the worker processes. Idempotent."""
        fetching, self._fetching = self._fetching, None
        if fetching is not None:
            fetching.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listed(self, epoch: int) -> list[list[int]]:
        """Returns the samples of each batch of an epoch, as the loader's own sampler gives them."""
        loader = self.loader
        things: tuple[Any, ...] = loader, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
        for thing in things:
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(epoch)
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(self._seed + epoch)  # a sampler may draw its seed here
        try:
            return [list(batch) for batch in islice(loader.batch_sampler, self._limit)]
        finally:
            torch.set_rng_state(before)

    def _order(self, epoch: int) -> Sequence[int]:
        listed = self._listed(epoch)
        order: list[int] = []
        for at in range(0, len(listed), self._per_step):
            order += _interleaved(listed[at : at + self._per_step], self._per_step)
        return order


def _interleaved(batches: Sequence[Sequence[int]], per_step: int) -> list[int]:
    """Spreads the rows of each batch of a step over the step; each index carries the number of its batch."""
    placed = [
        ((row + 0.5) / len(batch), number, index * per_step + number)
        for number, batch in enumerate(batches)
        for row, index in enumerate(batch)
    ]
    return [index for _, _, index in sorted(placed, key=lambda each: each[:2])]


class _Numbered:
    """A dataset whose indices carry the number of a batch; each sample comes with it."""

    def __init__(self, dataset: Any, per_step: int) -> None:
        self._dataset = dataset
        self._per_step = per_step
        if callable(getattr(dataset, "__getitems__", None)):
            self.__getitems__ = self._at_once

    def __len__(self) -> int:
        return len(self._dataset) * self._per_step

    def __getitem__(self, index: int) -> tuple[int, Any]:
        index, number = divmod(index, self._per_step)
        return number, self._dataset[index]

    def _at_once(self, indices: Iterable[int]) -> list[tuple[int, Any]]:
        split = [divmod(index, self._per_step) for index in indices]
        samples = self._dataset.__getitems__([index for index, _ in split])
        return [(number, sample) for (_, number), sample in zip(split, samples, strict=True)]


class _Collator:
    """Collates the rows of each batch apart: to their number, and what the loader's collator makes of them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[tuple[int, Any]]) -> dict[int, tuple[int, Any]]:
        rows: dict[int, list[Any]] = {}
        for number, sample in samples:
            rows.setdefault(number, []).append(sample)
        return {number: (len(found), self._collate(found)) for number, found in sorted(rows.items())}
