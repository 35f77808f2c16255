"""Which data loaders of a Trainer can be shared out, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from paceline.errors import UnsupportedOp
from paceline_transformers._samples import HostLoader

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest]

NUMBERS = list(range(10))


class Stream(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return iter(NUMBERS)


class Turning:
    """A sampler whose order depends on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(NUMBERS[self.epoch :] + NUMBERS[: self.epoch])


def test_the_order_is_that_of_the_sampler() -> None:
    sampler = Turning()
    batches: Any = BatchSampler(sampler, 4, drop_last=False)  # type: ignore[arg-type]
    batches.set_epoch = sampler.set_epoch
    loader = HostLoader(DataLoader(NUMBERS, batch_sampler=batches), 4, seed=0)
    assert (len(loader), loader.order(3)) == (10, [3, 4, 5, 6, 7, 8, 9, 0, 1, 2])


def test_a_sampler_that_draws_its_seed_gives_one_order_for_each_epoch() -> None:
    before = torch.get_rng_state()
    loader = HostLoader(DataLoader(NUMBERS, batch_size=4, sampler=RandomSampler(NUMBERS)), 4, seed=5)
    assert loader.order(0) == loader.order(0) != loader.order(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_that_are_left_out_are_not_counted() -> None:
    assert len(HostLoader(DataLoader(NUMBERS, batch_size=4, drop_last=True), 4, seed=0)) == 8


def test_loaders_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(UnsupportedOp, match="Stream does not have"):
        HostLoader(DataLoader(Stream(), batch_size=4), 4, seed=0)
    own = WeightedRandomSampler([1.0] * 10, 10, generator=torch.Generator())
    with pytest.raises(UnsupportedOp, match="another order each time"):
        HostLoader(DataLoader(NUMBERS, batch_size=4, sampler=own), 4, seed=0)
    with pytest.raises(UnsupportedOp, match="batches must have one size"):
        HostLoader(DataLoader(NUMBERS, batch_sampler=[[0, 1], [2, 3, 4, 5], [6]]), 4, seed=0)
    with pytest.raises(UnsupportedOp, match="divides batches of 4 samples"):
        HostLoader(DataLoader(NUMBERS, batch_size=2), 4, seed=0)
