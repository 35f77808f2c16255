"""`ElasticDataLoader` gives what the sampler says, however many workers fetch, and whoever comes and goes."""

from __future__ import annotations

import gc
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import paceline
from paceline.errors import SizeMismatch, StepOrderError, UnsupportedOp
from paceline.torch import ElasticDataLoader

pytestmark = [pytest.mark.needs(what="torch")]

N, BATCH = 23, 6


class Numbers(Dataset[Any]):
    """Each sample is its number, and three random ones."""

    def __init__(self, n: int = N) -> None:
        self.read: list[int] = []
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return index, random.random(), np.random.random(), torch.rand(2)


class At:
    """A rank's step where the sampler is, with what the loader asks of it."""

    number, left, asked = 1, False, False

    def __init__(
        self, sampler: paceline.ElasticSampler, rank: int = 0, world: int = 1, shares: tuple[int, ...] | None = None
    ) -> None:
        self.sampler, self.rank, self.world, self.shares = sampler, rank, world, shares
        self._indices, self.weight = sampler.current(rank, world, shares)

    @property
    def indices(self) -> Any:
        self.asked = True
        return self._indices


def at(*place: Any) -> Any:
    return At(*place)


def indices(batch: Any) -> list[int]:
    found: list[int] = batch[0].tolist()
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_reads_each_sample_once_in_a_new_order(workers: int) -> None:
    sampler = paceline.ElasticSampler(N, BATCH, seed=3)
    state = paceline.TrainState(sampler=sampler)
    used: list[list[int]] = []
    with ElasticDataLoader(Numbers(), num_workers=workers) as loader, paceline.join() as session:
        for step in session.steps(state, total=2 * sampler.steps_per_epoch):
            with step:
                used.append(indices(loader.batch(step)))
                assert used[-1] == step.indices.tolist()
    assert [len(batch) for batch in used] == [6, 6, 6, 5] * 2
    first, second = list(chain(*used[:4])), list(chain(*used[4:]))
    assert sorted(first) == sorted(second) == list(range(N))
    assert first != second


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_follow_world_changes_and_undone_steps(workers: int) -> None:
    """As in a line: the position moves when a step counts, and a step that is undone comes again in another world."""
    sampler, used = paceline.ElasticSampler(N, BATCH), []
    with ExitStack() as stack:
        loaders = [stack.enter_context(ElasticDataLoader(Numbers(), num_workers=workers)) for _ in range(4)]
        for world, counts in [(2, 1), (2, 1), (2, 0), (1, 1), (3, 0), (3, 0), (4, 1), (2, 1), (3, 0), (3, 1), (1, 0)]:
            steps = [at(sampler, rank, world) for rank in range(world)]
            found = [indices(loader.batch(step)) for loader, step in zip(loaders, steps, strict=False)]
            assert found == [step.indices.tolist() for step in steps]
            if counts:
                used += [index for step, batch in zip(steps, found, strict=True) if step.weight for index in batch]
                sampler.advance(world)
    assert (sampler.epoch, sampler.offset) == (1, 2 * BATCH)
    assert sorted(used[:N]) == list(range(N))
    assert len(set(used[N:])) == 2 * BATCH


@pytest.mark.parametrize("per_rank", [False, True])
def test_sampler_ahead_predicts_the_next_shares(per_rank: bool) -> None:
    sampler = paceline.ElasticSampler(N, None if per_rank else BATCH, per_rank_batch=BATCH if per_rank else None)
    planned = sampler.ahead(1, 2)
    for _ in range(9):
        expected, (taken, weight) = next(planned), sampler.current(1, 2)
        assert (expected.epoch, expected.offset, expected.weight) == (sampler.epoch, sampler.offset, weight)
        assert expected.indices.tolist() == taken.tolist()
        sampler.advance(2)


def test_a_worker_fetches_ahead_and_stops_when_the_ranks_change() -> None:
    sampler, log = paceline.ElasticSampler(N, BATCH), multiprocessing.get_context("fork").SimpleQueue()

    class Slow(Numbers):
        """The second batch takes until another plan has begun."""

        def __getitem__(self, index: int) -> Any:
            log.put(index)
            self.read.append(index)
            samples = get_worker_info().dataset
            before = int(samples._round)
            while len(self.read) == 4 and int(samples._round) == before:
                time.sleep(0.001)
            return index, 0

    with ElasticDataLoader(Slow(), num_workers=1, prefetch_factor=3) as loader:
        assert indices(loader.batch(at(sampler, 0, 2))) == sampler.batch(0)[:3].tolist()
        assert [log.get() for _ in range(4)][3] == sampler.batch(1)[0], "the next batch is fetched unasked"
        assert indices(loader.batch(at(sampler, 0, 1))) == sampler.batch(0).tolist(), "the world is smaller now"
        assert [log.get() for _ in range(BATCH)] == sampler.batch(0).tolist(), "the rest of the old plan is not read"


def test_loading_a_batch_reads_step_indices() -> None:
    """By reading `step.indices`: DDP weighs the rank's gradients by that."""
    step = at(paceline.ElasticSampler(N, BATCH))
    with ElasticDataLoader(Numbers()) as loader:
        assert not step.asked
        loader.batch(step)
        assert step.asked


@pytest.mark.parametrize("worlds", [[1] * 4, [3] * 4, [2, 3, 1, 2]])
@pytest.mark.parametrize("workers", [0, 2])
def test_random_transforms_do_not_depend_on_world_or_workers(worlds: Sequence[int], workers: int) -> None:
    sampler, found = paceline.ElasticSampler(N, BATCH, seed=8), {}
    with ElasticDataLoader(Numbers(), num_workers=workers) as loader:
        for world in worlds:
            for rank in range(world):
                for number, *values in zip(*loader.batch(at(sampler, rank, world)), strict=True):
                    found[int(number)] = [value.tolist() for value in values]
            sampler.advance(world)
        assert len(found) == N
        with ElasticDataLoader(Numbers()) as other:
            plain = paceline.ElasticSampler(N, N, seed=8)
            for number, *values in zip(*other.batch(at(plain)), strict=True):
                assert found[int(number)] == [value.tolist() for value in values]
        again = [value.tolist() for value in next(zip(*loader.batch(at(sampler)), strict=True))]
        assert again[1:] != found[again[0]], "in the next epoch it is another"


def test_loading_leaves_the_random_state_of_training_unchanged() -> None:
    sampler = paceline.ElasticSampler(N, BATCH)

    def drawn() -> list[Any]:
        return [random.random(), float(np.random.random()), torch.rand(()).item()]

    for workers in (0, 1):
        found = []
        for fetches in (False, True):
            random.seed(1)
            np.random.seed(1)
            torch.manual_seed(1)
            if fetches:
                with ElasticDataLoader(Numbers(), num_workers=workers) as loader:
                    loader.batch(at(sampler))
            found.append(drawn())
        assert found[0] == found[1]


class Broken(Numbers):
    """Its sample 5 cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise LookupError(f"sample {index} is damaged")
        return index, 0


@pytest.mark.parametrize("workers", [0, 2])
def test_dataset_errors_are_raised_unchanged_and_end_the_workers(workers: int) -> None:
    sampler = paceline.ElasticSampler(N, BATCH)
    state = paceline.TrainState(sampler=sampler)
    counted = []
    with paceline.join() as session, ElasticDataLoader(Broken(), num_workers=workers) as loader:

        def train() -> None:
            for step in session.steps(state, total=8):
                with step:
                    loader.batch(step)
                counted.append(step.number)

        with pytest.raises(LookupError, match="sample 5 is damaged"):
            train()
        assert not multiprocessing.active_children(), "an error ends the workers too"
        broken_at = next(t for t in range(4) if 5 in sampler.batch(t))
        assert counted == list(range(1, broken_at + 1)), "the steps before it count, it does not"
        sampler.load_state_dict({"epoch": 0, "offset": (broken_at + 1) % 4 * BATCH})
        assert indices(loader.batch(at(sampler))) == sampler.current(0, 1)[0].tolist(), "it can go on"
    assert not multiprocessing.active_children()


def test_workers_end_on_exit_close_and_garbage_collection() -> None:
    sampler = paceline.ElasticSampler(N, BATCH)
    with ElasticDataLoader(Numbers(), num_workers=2) as loader:
        assert len(multiprocessing.active_children()) == 2, "they start with the loader"
        loader.batch(at(sampler))
    assert not multiprocessing.active_children()
    assert indices(loader.batch(at(sampler))) == sampler.batch(0).tolist(), "and again, if it is used again"
    loader.close()
    loader.close()
    assert not multiprocessing.active_children()
    dropped = ElasticDataLoader(Numbers(), num_workers=1)
    dropped.batch(at(sampler))
    del dropped
    gc.collect()
    assert not multiprocessing.active_children()


def test_getitems_gives_the_same_samples_with_and_without_workers() -> None:
    class AtOnce(Numbers):
        def __getitems__(self, several: list[int]) -> Any:
            return [(index, torch.rand(())) for index in several]

    sampler, found = paceline.ElasticSampler(N, BATCH), []
    for workers in (0, 1):
        with ElasticDataLoader(AtOnce(), num_workers=workers) as loader:
            found.append([column.tolist() for column in loader.batch(at(sampler))])
    assert found[0] == found[1]
    assert found[0][0] == sampler.batch(0).tolist()


def test_an_order_of_the_user_may_leave_samples_out() -> None:
    sampler = paceline.ElasticSampler(BATCH, BATCH, order=lambda epoch: range(N - BATCH, N))
    with ElasticDataLoader(Numbers(), collate_fn=list) as loader:
        assert [sample[0] for sample in loader.batch(at(sampler))] == list(range(N - BATCH, N))


def test_torch_settings_are_passed_on_or_refused() -> None:
    sampler = paceline.ElasticSampler(N, BATCH)
    with ElasticDataLoader(Numbers(), collate_fn=len) as loader:
        assert loader.batch(at(sampler)) == BATCH
    for refused in ("generator", "batch_sampler", "persistent_workers"):
        with pytest.raises(TypeError, match=refused):
            ElasticDataLoader(Numbers(), **{refused: None})
    with pytest.raises(ValueError, match="mutually exclusive"):
        ElasticDataLoader(Numbers(), batch_size=4)


def test_misuse_of_the_loader_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(N))

    with pytest.raises(UnsupportedOp, match="Stream is an IterableDataset"):
        ElasticDataLoader(Stream())
    sampler = paceline.ElasticSampler(N, BATCH)
    with pytest.raises(SizeMismatch, match="23 samples, but the dataset has 24"):
        ElasticDataLoader(Numbers(24)).batch(at(sampler))
    with paceline.join() as session:
        state, loader = paceline.TrainState(sampler=sampler), ElasticDataLoader(Numbers())
        for step in session.steps(state, total=1):
            with step:
                pass
            with pytest.raises(StepOrderError, match="step 1 is over"):
                loader.batch(step)
    with paceline.join() as session:
        for step in session.steps(paceline.TrainState(notes={}), total=1):
            with step, pytest.raises(UnsupportedOp, match="has no sampler"):
                loader.batch(step)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_follow_the_shares_of_each_step(workers: int) -> None:
    """When the shares change, the loader drops its prefetched batches and fetches them again."""
    sampler, data = paceline.ElasticSampler(N, BATCH, seed=3), Numbers()
    used: list[int] = []
    with ElasticDataLoader(data, num_workers=workers) as loader:
        for shares in (None, None, (5, 1), (5, 1), (2, 4), None, (1, 5), (1, 5)):
            mine = at(sampler, 0, 2, shares)
            found = indices(loader.batch(mine))
            assert found == mine._indices.tolist()
            other, weight = sampler.current(1, 2, shares)
            used += [*(found if mine.weight else []), *(other.tolist() if weight else [])]
            sampler.advance(2)
    assert sorted(used) == sorted([*range(N)] * 2)
