"""A stream in shards: each sample is read by one rank and counts once, while ranks come and go."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import paceline
from paceline._group import Group
from paceline.errors import DataWorkerLost, StepOrderError, UnsupportedOp
from paceline.testing import run_ranks
from paceline.torch import ElasticStreamLoader
from support.shard_turns import one_by_one

pytestmark = [pytest.mark.needs(what="torch")]

LENGTHS = [11, 7, 0, 12, 9]
BATCH = 6
STEPS = len(one_by_one(LENGTHS, BATCH))
"""Steps of an epoch: 39 samples, 6 at a time."""


class Shard(IterableDataset[int]):
    """As those of Hugging Face: a state counts in its own epoch only, and loading takes effect in the next `iter`.

    Samples have numbers of 1,000 times the shard's and up; those of an odd epoch come in the opposite order.
    """

    def __init__(self, number: int, length: int) -> None:
        self.samples = [1000 * number + i for i in range(length)]
        self.epoch = self.reads = 0
        self._at = {"epoch": 0, "i": 0}
        self._start: dict[str, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return self._at

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state

    def __iter__(self) -> Iterator[int]:
        start = self._start if self._start is not None and self._start["epoch"] == self.epoch else {"i": 0}
        self._at = {"epoch": self.epoch, "i": start["i"]}
        for i in range(start["i"], len(self.samples)):
            self._at["i"] = i + 1
            self.reads += 1
            yield self.samples[-1 - i if self.epoch % 2 else i]


def make(lengths: list[int] = LENGTHS, batch: int = BATCH, **settings: Any) -> tuple[ElasticStreamLoader, list[Shard]]:
    shards = [Shard(number, length) for number, length in enumerate(lengths)]
    return ElasticStreamLoader(shards, batch, **settings), shards


def step_of(group: Group, weights: list[float]) -> Any:
    """A step's place, with what the loader asks of it."""
    return SimpleNamespace(
        generation=group.generation,
        rank=group.rank,
        world=group.size,
        _group=group,
        count=lambda weight, of: weights.append(weight),
        _check_source=lambda of: None,
    )


def taken(world: int, steps: int, state: Any = None, **settings: Any) -> tuple[list[list[int]], Any, int]:
    """Returns the samples of each step over all ranks, the state after the last step, and the number of reads."""

    loaders = [make(**settings) for _ in range(world)]  # here, because they start processes

    def rank(group: Group) -> Any:
        loader, shards = loaders[group.rank]
        if state is not None:
            loader.load_state_dict(state)
        with loader:
            found = []
            for _ in range(steps):
                weights: list[float] = []
                batch = loader.batch(step_of(group, weights)).tolist()
                found.append((batch, weights[0]))
            return found, loader.state_dict(), sum(shard.reads for shard in shards)

    results = run_ranks(world, rank)
    together = []
    for each in zip(*(found for found, _, _ in results), strict=True):
        assert sum(weight for _, weight in each) == pytest.approx(1.0)
        mine = [batch for batch, weight in each if weight]
        size = sum(map(len, mine))
        assert [weight for _, weight in each if weight] == pytest.approx([len(batch) / size for batch in mine])
        together.append(sorted(chain(*mine)))
    states = [saved for _, saved, _ in results]
    assert len({repr(saved) for saved in states}) == 1
    return together, states[0], sum(reads for _, _, reads in results)


def expected(epochs: int, lengths: list[int] = LENGTHS, batch: int = BATCH) -> list[list[int]]:
    """The samples of each step, sorted."""
    steps = []
    for epoch in range(epochs):
        streams = [
            iter(Shard(number, length).samples[:: -1 if epoch % 2 else 1]) for number, length in enumerate(lengths)
        ]
        for shares in one_by_one(lengths, batch):
            steps.append(sorted(next(streams[shard]) for shard, share in enumerate(shares) for _ in range(share)))
    return steps


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_each_epoch_has_each_sample_once_and_one_rank_reads_it(world: int, caplog: pytest.LogCaptureFixture) -> None:
    found, _, reads = taken(world, 3 * STEPS)
    without = [f"rank {rank} has no samples: the stream has 5 shards for 7 ranks" for rank in range(5, world)]
    assert sorted(caplog.messages) == without
    assert found == expected(3)
    idle = len(set(range(world)) - {shard % world for shard, length in enumerate(LENGTHS) if length})
    assert reads == 3 * sum(LENGTHS) + idle  # a rank that never has a sample reads one of another's


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_follow_world_changes_and_undone_steps(workers: int) -> None:
    """Each time another number of new ranks goes on from a state, which lies before the end of the steps before."""
    state, known = None, expected(4)
    begin = 0
    for world, steps, counts in [(2, 3, 2), (3, 4, 4), (1, 9, 8), (4, 2, 2), (2, STEPS, STEPS - 1), (3, 3, 3)]:
        found, _, _ = taken(world, steps, state, num_workers=workers)
        assert found == known[begin : begin + steps]
        again, state, _ = taken(world, counts, state, num_workers=workers)
        assert again == found[:counts]
        begin += counts


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_goes_back_to_an_undone_step_and_on_with_other_shards(workers: int) -> None:
    """The same loaders in one generation after the other: they may have read on, or back, or not at all."""
    loaders = [make(num_workers=workers)[0] for _ in range(3)]
    known, begin = expected(6), 0
    try:
        for generation, (world, undone, counts) in enumerate([(3, 1, 5), (2, 0, 4), (3, 2, 7), (1, 1, 9), (3, 0, 8)]):
            state = loaders[0].state_dict()

            def rank(
                group: Group,
                state: Any = state,
                generation: int = generation,
                undone: int = undone,
                counts: int = counts,
            ) -> list[list[int]]:
                loader, found = loaders[group.rank], []
                for steps in (undone, counts):
                    loader.load_state_dict(state)
                    for _ in range(steps):
                        weights: list[float] = []
                        step = step_of(group, weights)
                        step.generation = generation
                        batch = loader.batch(step).tolist()
                        found.append(batch if weights[0] else [])
                return found[undone:]

            results = run_ranks(world, rank)
            together = [sorted(chain(*each)) for each in zip(*results, strict=True)]
            assert together == known[begin : begin + counts]
            begin += counts
    finally:
        for loader in loaders:
            loader.close()


def test_shuffled_windows_follow_from_the_seed_and_the_epoch() -> None:
    found, _, _ = taken(1, 3 * STEPS, shuffle=4)
    other, _, _ = taken(3, 3 * STEPS, shuffle=4)
    assert found == other
    assert sorted(chain(*found[:STEPS])) == sorted(chain(*found[2 * STEPS :])) == sorted(chain(*expected(1)))
    assert found[:STEPS] != expected(1)
    assert found[:STEPS] != found[2 * STEPS :]  # the shards have the same order in both
    assert taken(1, STEPS, shuffle=4, seed=1)[0] != found[:STEPS]
    _, middle, _ = taken(2, 5, shuffle=4)
    assert taken(3, 6, middle, shuffle=4)[0] == found[5:11]


@pytest.mark.parametrize(
    ("lengths", "batch"),
    [
        ([70, 45, 120, 3, 88], 7),  # each shard is read in many chunks
        ([20 + 5 * number for number in range(16)], 6),  # a rank may have no sample in a step
        ([21] * 40 + [300], 40),  # one shard has to give all
        ([64] * 8, 8),  # chunks end where the shards do
        ([30] * 8, 2),  # a rank may have no sample in its first step
    ],
    ids=["long", "many", "one is longer", "even", "small steps"],
)
@pytest.mark.parametrize("shuffle", [0, 5])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_go_on_in_the_middle_of_shards(lengths: list[int], batch: int, shuffle: int, workers: int) -> None:
    settings: dict[str, Any] = {"lengths": lengths, "batch": batch, "shuffle": shuffle}
    known = expected(2, lengths, batch)
    if shuffle:
        known, _, _ = taken(1, len(known), **settings)
    state, begin = None, 0
    for turn in range(1000):
        steps = min(1 + 5 * turn % 13, len(known) - begin)
        found, state, _ = taken(1 + (turn + 1) % 4, steps, state, num_workers=workers, **settings)
        assert found == known[begin : begin + steps]
        begin += steps
        if begin == len(known):
            break
    assert sorted(chain(*known)) == sorted(
        2 * [1000 * n + i for n, length in enumerate(lengths) for i in range(length)]
    )


@pytest.mark.parametrize("shuffle", [0, 7])
def test_a_shard_with_another_reader_is_read_from_a_place_nearby(shuffle: int) -> None:
    """Of each shard that moves, two chunks at most; and no rank has read far ahead."""
    lengths, chunk = [4000] * 8, shuffle or 8 * BATCH // 8
    _, state, reads = taken(4, 200, lengths=lengths, shuffle=shuffle)
    ahead = 8 * (BATCH + 3 * chunk)
    assert reads <= 200 * BATCH + ahead
    _, _, more = taken(3, 100, state, lengths=lengths, shuffle=shuffle)
    assert more <= 100 * BATCH + 2 * 8 * chunk + ahead


def test_a_shard_that_is_used_up_is_not_read_by_its_next_reader() -> None:
    lengths = [45, 45, 400]
    _, state, _ = taken(1, 40, lengths=lengths, shuffle=20)  # of the last shard more than 100 are left
    loaders = [make(lengths, shuffle=20) for _ in range(2)]

    def rank(group: Group) -> None:
        loaders[group.rank][0].load_state_dict(state)
        for _ in range(3):
            loaders[group.rank][0].batch(step_of(group, []))

    run_ranks(2, rank)
    reads = np.sum([[shard.reads for shard in shards] for _, shards in loaders], 0)
    assert reads[:2].tolist() == [0, 1]  # rank 1 has no sample, and takes one of its own shard


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_is_refused_moves_nothing(workers: int) -> None:
    """In the step with which another epoch begins, and in one that tells of what was read."""
    loader, found = make(num_workers=workers)[0], list[list[int]]()
    with loader, paceline.join() as session:
        for step in session.steps(paceline.TrainState(data=loader), total=2 * STEPS):
            with step:
                found.append(sorted(loader.batch(step).tolist()))
                before = repr(loader.state_dict())
                with pytest.raises(StepOrderError, match="already has its batch"):
                    loader.batch(step)
                assert repr(loader.state_dict()) == before
    assert found == expected(2)


def test_a_step_does_not_read_many_chunks_at_once() -> None:
    chunk, reads = 7, list[int]()
    loader, shards = make([4000] * 8, shuffle=chunk)

    def rank(group: Group) -> None:
        for _ in range(200):
            loader.batch(step_of(group, []))
            reads.append(sum(shard.reads for shard in shards))

    run_ranks(1, rank)
    assert max(np.diff(reads)) <= 2 * chunk


def test_the_loader_trains_in_steps_of_a_session() -> None:
    used, loader = list[list[int]](), make(num_workers=1)[0]
    with loader, paceline.join() as session:
        for step in session.steps(paceline.TrainState(data=loader), total=STEPS + 2):
            with step:
                used.append(sorted(loader.batch(step).tolist()))
    assert used == expected(2)[: STEPS + 2]


class Stuck(Shard):
    """Its state does not change."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 0, "i": 0}


class Forgetful(Shard):
    """It gives less after a state was loaded."""

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            if self._start is not None and self._start["i"] and sample % 1000 > 26:
                return
            yield sample


def batches(loader: ElasticStreamLoader, steps: int, state: Any = None) -> Any:
    def rank(group: Group) -> Any:
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(steps):
            loader.batch(step_of(group, []))
        return loader.state_dict()

    return run_ranks(1, rank)[0]


def test_shards_that_cannot_be_read_on_are_refused() -> None:
    with pytest.raises(UnsupportedOp, match=r"Stuck.state_dict\(\) has not changed in 12 samples"):
        batches(ElasticStreamLoader([Stuck(0, 100) for _ in range(4)], BATCH), 9)  # in the second chunk
    with pytest.raises(UnsupportedOp, match="all shards of the stream are empty"):
        batches(make(lengths=[0, 0])[0], 1)
    shards = [Forgetful(number, 100) for number in range(2)]
    state = batches(ElasticStreamLoader(shards, BATCH, shuffle=4), 9)  # read until 48, and 24 can be read on from
    with pytest.raises(UnsupportedOp, match="Forgetful gave 27 samples of shard 0 in epoch 0, and more when"):
        batches(ElasticStreamLoader([Forgetful(number, 100) for number in range(2)], BATCH, shuffle=4), 1, state)


def test_a_position_in_another_order_is_refused() -> None:
    state = batches(make(shuffle=4)[0], 3)
    for other in (make(shuffle=5), make(shuffle=4, seed=1), make(shuffle=4, lengths=[*LENGTHS, 3])):
        with pytest.raises(UnsupportedOp, match="the position was saved with shards=5, shuffle=4, seed=0, and this"):
            batches(other[0], 1, state)
    of_one = {"epoch": 0, "batches": 0, "ended": False, "state": None}
    with pytest.raises(UnsupportedOp, match="saved by a loader of one stream, and this one has a list"):
        batches(make()[0], 1, of_one)
    with pytest.raises(UnsupportedOp, match="saved by a loader of 5 streams, and this one has one"):
        ElasticStreamLoader(Shard(0, 5), BATCH).load_state_dict(state)


def test_a_shard_that_raises_is_read_on_from_the_chunk_before() -> None:
    class Broken(Shard):
        fails = True

        def __iter__(self) -> Iterator[int]:
            for sample in super().__iter__():
                if sample == 1010 and self.fails:
                    raise OSError("the network is down")
                yield sample

    shards = [Broken(number, 40) for number in range(2)]
    loader, found = ElasticStreamLoader(shards, 2, shuffle=4), list[list[int]]()

    def rank(group: Group) -> None:
        for _ in range(12):
            try:
                found.append(sorted(loader.batch(step_of(group, [])).tolist()))
            except OSError:
                Broken.fails = False

    run_ranks(1, rank)
    assert 8 <= len(found) < 12
    assert found == taken(1, len(found), lengths=[40, 40], batch=2, shuffle=4)[0]


def test_arguments_that_do_not_fit_are_refused() -> None:
    shard = Shard(0, 5)
    with pytest.raises(UnsupportedOp, match=r"shuffle needs a list of streams: .*pass \[dataset\]"):
        ElasticStreamLoader(shard, BATCH, shuffle=4)
    for wrong in ([], [shard, shard]):
        with pytest.raises(ValueError, match="want a list of streams, at least one"):
            ElasticStreamLoader(wrong, BATCH)
    with pytest.raises(UnsupportedOp, match=r"range has no state_dict"):
        ElasticStreamLoader([range(3)], BATCH)
    with pytest.raises(ValueError, match="shuffle >= 0"):
        ElasticStreamLoader([shard], BATCH, shuffle=-1)


class Noisy(Shard):
    """Its samples have random numbers."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield [float(sample), float(torch.rand(())), np.random.random()]


def noisy_rows(rows: list[list[float]]) -> Any:
    """Gives a batch another random number."""
    return torch.tensor(rows, dtype=torch.float64), torch.rand(())


def noise(world: int, steps: int, state: Any = None, **settings: Any) -> tuple[list[Any], list[Any], Any]:
    """The rows of all ranks, what their collation drew in each step, and the state behind them."""

    def noisy() -> ElasticStreamLoader:
        shards = [Noisy(number, 5 * length) for number, length in enumerate(LENGTHS)]
        return ElasticStreamLoader(shards, BATCH, seed=3, collate_fn=noisy_rows, **settings)

    loaders = [noisy() for _ in range(world)]

    def rank(group: Group) -> Any:
        rows, draws = list[Any](), list[float]()
        with loaders[group.rank] as loader:
            if state is not None:
                loader.load_state_dict(state)
            for _ in range(steps):
                weights: list[float] = []
                batch, draw = loader.batch(step_of(group, weights))
                rows += batch.tolist() if weights[0] else []
                draws.append(float(draw))
            return rows, draws, loader.state_dict()

    results = run_ranks(world, rank)
    return sorted(chain(*(rows for rows, _, _ in results))), [draws for _, draws, _ in results], results[0][2]


def test_transforms_are_the_same_in_any_world_and_collation_in_the_same_world() -> None:
    # With a worker process each, because ranks here are threads, which have one generator.
    rows, draws, _ = noise(1, 25)
    first, _, middle = noise(3, 14, num_workers=1)
    second, drawn, _ = noise(2, 11, middle, num_workers=1)
    assert sorted(first + second) == rows
    assert len({row[1] for row in rows}) == len(rows)
    assert noise(2, 11, middle, num_workers=1)[1] == drawn
    assert len(set(drawn[0])) == 11
    assert noise(1, 25, num_workers=1)[1] == draws


@pytest.fixture
def _no_signal_handler_of_torch() -> Iterator[None]:
    """torch's handler would raise in the main thread, which only waits for the threads of the ranks here."""
    ElasticStreamLoader(Shard(0, 1), 1, num_workers=1).close()  # torch sets its handler once in a process
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, handler)


@pytest.mark.usefixtures("_no_signal_handler_of_torch")
def test_a_worker_process_that_dies_is_replaced_by_one_that_reads_on() -> None:
    lengths, steps, lost = [400, 250, 600], 150, 0
    (loader, _), found = make(lengths, num_workers=1), list[list[int]]()

    def rank(group: Group) -> None:
        nonlocal lost
        while len(found) < steps:
            if len(found) == 3:
                (process,) = multiprocessing.active_children()
                process.kill()
                process.join()
            step = step_of(group, [])
            try:
                batch = loader.batch(step)
            except DataWorkerLost:
                lost += 1
                batch = loader.batch(step)
            found.append(sorted(batch.tolist()))

    with loader:
        run_ranks(1, rank)
    assert lost == 1
    assert found == expected(1, lengths)[:steps]


@pytest.mark.parametrize("shards", [1, 3, 5, 7])
def test_index_shards_cuts_at_the_ends_of_files(shards: int) -> None:
    files = [3, 1, 9, 2, 2, 6, 1]
    dataset = range(sum(files))
    found = [list(shard) for shard in paceline.torch.index_shards(dataset, shards, files=files)]
    assert list(chain(*found)) == list(dataset)
    ends = np.cumsum(files).tolist()
    assert all(samples[-1] + 1 in ends for samples in found)
    assert [len(each) for each in map(list, paceline.torch.index_shards(range(10), 4))] == [2, 3, 2, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_ranges_of_indices_are_read_on(workers: int) -> None:
    found, state = list[int](), None
    for world in (2, 3):
        loaders = [
            ElasticStreamLoader(paceline.torch.index_shards(range(40), 4), BATCH, num_workers=workers, shuffle=3)
            for _ in range(world)
        ]

        def rank(group: Group, loaders: Any = loaders, state: Any = state) -> Any:
            loader, weights = loaders[group.rank], list[float]()
            if state is not None:
                loader.load_state_dict(state)
            with loader:
                batches = [loader.batch(step_of(group, weights)).tolist() for _ in range(3 if state is None else 4)]
            return [batch for batch, weight in zip(batches, weights, strict=True) if weight], loader.state_dict()

        results = run_ranks(world, rank)
        state = results[0][1]
        found += chain(*(chain(*batches) for batches, _ in results))
    assert sorted(found) == list(range(40))


@pytest.mark.parametrize(("shards", "files"), [(0, None), (11, None), (3, [5, 5]), (2, [5, 4])])
def test_ranges_that_do_not_fit_are_refused(shards: int, files: list[int] | None) -> None:
    with pytest.raises(ValueError, match="want 1 to"):
        paceline.torch.index_shards(range(10), shards, files=files)
