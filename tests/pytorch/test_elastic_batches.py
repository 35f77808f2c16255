"""`ElasticBatches`: each rank has its part of each batch of a loader, and gradients are those of the whole batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

import paceline
from paceline.errors import UnsupportedOp
from paceline.torch import ElasticBatches

pytestmark = [pytest.mark.needs(what="torch")]

NUMBERS = [float(number) for number in range(23)]


class At:
    """A rank's step where the sampler is, with what the batches ask of it."""

    number, left, shares = 1, False, None

    def __init__(self, sampler: paceline.ElasticSampler, rank: int, world: int) -> None:
        self.sampler, self.rank, self.world = sampler, rank, world
        self.indices, self.weight = sampler.current(rank, world)


class AtOnce(list[float]):
    """A dataset that reads several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[float]:
        return [self[index] for index in indices]


class Stream(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[float]:
        return iter(NUMBERS)


class Turning:
    """A sampler whose order depends on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([*range(self.epoch, 23), *range(self.epoch)])


def parts_of(batches: ElasticBatches, world: int) -> list[list[Any]]:
    """The parts of all ranks in the present step, which then counts."""
    found = [batches.parts(At(batches.sampler, rank, world)) for rank in range(world)]  # type: ignore[arg-type]
    batches.sampler.advance(world)
    return found


@pytest.mark.parametrize("dataset", [NUMBERS, AtOnce(NUMBERS)], ids=["one by one", "at once"])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_share_out_each_batch_in_order(dataset: Any, world: int) -> None:
    """23 samples in batches of 4, 3 to a step: the last step has 2 whole batches and one of 3 samples."""
    with ElasticBatches(DataLoader(dataset, 4), per_step=3) as batches:
        assert (len(batches), batches.sampler.steps_per_epoch) == (6, 2)
        seen: list[list[float]] = []
        for _ in range(2):
            found = parts_of(batches, world)
            for parts in zip(*found, strict=True):
                seen.append([value for part in parts if part.rows for value in part.batch.tolist()])
                assert {part.of for part in parts} == {len(seen[-1])}
                assert max(part.rows for part in parts) - min(part.rows for part in parts) <= 1
    if world == 1:
        assert seen == [NUMBERS[at : at + 4] for at in range(0, 23, 4)]
    assert [sorted(each) for each in seen] == [NUMBERS[at : at + 4] for at in range(0, 23, 4)]


@pytest.mark.parametrize("world", [1, 2, 5, 13])
def test_the_sum_of_scaled_losses_over_ranks_is_the_loss_of_one_process(world: int) -> None:
    with ElasticBatches(DataLoader(NUMBERS, 4), per_step=3) as batches:
        for step in range(2):
            weights = [batches.sampler.current(rank, world)[1] for rank in range(world)]
            found = parts_of(batches, world)
            total = sum(
                weight * part.scale * part.batch.mean()
                for weight, parts in zip(weights, found, strict=True)
                for part in parts
            )
            means = [torch.tensor(NUMBERS[at : at + 4]).mean() for at in range(12 * step, min(12 * step + 12, 23), 4)]
            assert float(total) == pytest.approx(float(sum(means)))


def test_one_rank_has_the_batches_of_the_loader_unscaled() -> None:
    with ElasticBatches(DataLoader(NUMBERS, 4), per_step=2) as batches:
        (parts,) = parts_of(batches, 1)
    assert [(part.number, part.rows, part.scale) for part in parts] == [(0, 4, 1.0), (1, 4, 1.0)]
    assert [part.batch.tolist() for part in parts] == [NUMBERS[:4], NUMBERS[4:8]]


def test_batches_come_in_the_order_of_the_sampler() -> None:
    sampler = Turning()
    batches: Any = BatchSampler(sampler, 4, drop_last=True)  # type: ignore[arg-type]
    with ElasticBatches(DataLoader(NUMBERS, batch_sampler=batches), limit=2) as elastic:
        found = [parts_of(elastic, 1)[0][0].batch.tolist() for _ in range(4)]
    assert found == [NUMBERS[:4], NUMBERS[4:8], NUMBERS[1:5], NUMBERS[5:9]]


def test_shuffling_follows_the_seed_and_the_epoch() -> None:
    before = torch.get_rng_state()
    orders = [
        [parts_of(ElasticBatches(DataLoader(NUMBERS, 23, shuffle=True), seed=seed), 1)[0][0].batch.tolist()]
        for seed in (3, 3, 4)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_loaders_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(UnsupportedOp, match="a loader of Stream does not have"):
        ElasticBatches(DataLoader(Stream(), batch_size=4))
    with pytest.raises(UnsupportedOp, match="give a DataLoader with batches"):
        ElasticBatches(DataLoader(NUMBERS, batch_size=None))
    own = WeightedRandomSampler([1.0] * 23, 23, generator=torch.Generator())
    with pytest.raises(UnsupportedOp, match="another order each time"):
        ElasticBatches(DataLoader(NUMBERS, batch_size=4, sampler=own))
    with pytest.raises(UnsupportedOp, match="must have one size"):
        ElasticBatches(DataLoader(NUMBERS, batch_sampler=[[0, 1], [2, 3, 4, 5], [6]]))
    with pytest.raises(ValueError, match="at least 1"):
        ElasticBatches(DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS), batch_size=4), per_step=0)
