"""The samples of the Trainer's data loader, in its order, for the steps of a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import paceline.torch
from paceline.errors import UnsupportedOp

Batch = tuple[int, Any]
"""Samples that go through the model together: their number, and what the collator has made of them."""


class HostLoader:
    """The data loader that the Trainer has made, `loader`: what it reads, in which `order`. Its length is in samples.

    `rows` are the samples of its batches, and `seed` is for a sampler that draws its own seed.
    """

    def __init__(self, loader: Any, rows: int, seed: int) -> None:
        batches = paceline.torch.ElasticBatches(loader, seed=seed)
        if len(batches) > 1 and batches.rows != rows:
            raise UnsupportedOp(
                f"ElasticTrainer divides batches of {rows} samples, and those of the sampler have {batches.rows}"
            )
        self.loader = loader
        self.seed = seed
        self.order = batches.sampler.order
        self._rows, self._length = rows, batches.sampler.n

    def __len__(self) -> int:
        return self._length

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
