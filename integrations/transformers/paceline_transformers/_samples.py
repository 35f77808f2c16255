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
    """The data loader that the Trainer has made, `loader`: what it reads, in which order. Its length is in samples."""

    def __init__(self, loader: Any) -> None:
        if getattr(loader, "batch_sampler", None) is None or isinstance(
            loader.dataset, torch.utils.data.IterableDataset
        ):
            raise UnsupportedOp(
                f"ElasticTrainer shares out samples by their numbers, which {type(loader.dataset).__name__} does not "
                "have: give it a dataset with __getitem__ and __len__"
            )
        self.loader = loader
        self._length = len(self.order(0))

    def __len__(self) -> int:
        return self._length

    def order(self, epoch: int) -> Sequence[int]:
        """Returns the samples of an epoch in the order of the Trainer's own sampler."""
        loader = self.loader
        things: tuple[Any, ...] = loader, loader.batch_sampler, getattr(loader.batch_sampler, "batch_sampler", None)
        for thing in things:
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(epoch)
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(epoch)  # for a sampler that draws its seed here: the same on all workers
        try:
            return [index for batch in loader.batch_sampler for index in batch]
        finally:
            torch.set_rng_state(before)

    def elastic(self, rows: int) -> paceline.torch.ElasticDataLoader:
        """Returns a loader of the same dataset; each of its results is a list of `Batch`es of at most `rows`."""
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
            collate_fn=_Collator(loader.collate_fn, rows),
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
