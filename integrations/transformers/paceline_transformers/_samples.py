"""The samples of the Trainer's data loader, in its order, for the steps of a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import paceline.torch
from paceline.errors import UnsupportedOp

Batch = tuple[int, Any]
"""Samples that go through the model together: their number, and what the collator has made of them."""


class HostLoader:
    """The data loader that the Trainer has made, `loader`: what it reads, in which order. Its length is in samples.

    `rows` are the samples of its batches, and `seed` is for a sampler that draws its own seed.
    """

    def __init__(self, loader: Any, rows: int, seed: int) -> None:
        if getattr(loader, "batch_sampler", None) is None or isinstance(
            loader.dataset, torch.utils.data.IterableDataset
        ):
            raise UnsupportedOp(
                f"ElasticTrainer shares out samples by their numbers, which {type(loader.dataset).__name__} does not "
                "have: give it a dataset with __getitem__ and __len__"
            )
        self.loader = loader
        self.seed = seed
        self._rows = rows
        batches = self._batches(0)
        if batches != self._batches(0):
            raise UnsupportedOp(
                f"the sampler of {type(loader.dataset).__name__} gives another order each time, so workers would not "
                "agree: let it depend on set_epoch(epoch), and give it no generator of its own"
            )
        if any(len(batch) != rows for batch in batches[:-1]):
            raise UnsupportedOp(f"ElasticTrainer divides batches of {rows} samples, and those of the sampler differ")
        self._length = sum(map(len, batches))

    def __len__(self) -> int:
        return self._length

    def order(self, epoch: int) -> Sequence[int]:
        """Returns the samples of an epoch in the order of the Trainer's own sampler."""
        return [index for batch in self._batches(epoch) for index in batch]

    def _batches(self, epoch: int) -> list[list[int]]:
        loader = self.loader
        things: tuple[Any, ...] = loader, loader.batch_sampler, getattr(loader.batch_sampler, "batch_sampler", None)
        for thing in things:
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(epoch)
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(self.seed + epoch)  # a sampler may draw its seed here
        try:
            return [list(batch) for batch in loader.batch_sampler]
        finally:
            torch.set_rng_state(before)

    def elastic(self) -> paceline.torch.ElasticDataLoader:
        """Returns a loader of the same dataset; each of its results is a list of `Batch`es."""
        loader = self.loader
        workers: dict[str, Any] = {}
        if loader.num_workers:
            workers = {
                "prefetch_factor": loader.prefetch_factor,
                "multiprocessing_context": loader.multiprocessing_context,
                "timeout": loader.timeout,
            }
        return paceline.torch.ElasticDataLoader(
            loader.dataset,
            num_workers=loader.num_workers,
            collate_fn=_Collator(loader.collate_fn, self._rows),
            pin_memory=loader.pin_memory and torch.cuda.is_available(),
            **workers,
        )


class _Collator:
    """Collates samples in batches of a few rows."""

    def __init__(self, collate: Callable[[list[Any]], Any], rows: int) -> None:
        self._collate = collate
        self._rows = rows

    def __call__(self, samples: list[Any]) -> list[Batch]:
        parts = [samples[at : at + self._rows] for at in range(0, len(samples), self._rows)]
        return [(len(part), self._collate(part)) for part in parts]
