"""`ElasticStreamLoader`: each sample of a stream counts once, whoever reads it, and whoever comes and goes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import paceline
from paceline.errors import DataWorkerLost, StepOrderError, UnsupportedOp
from paceline.torch import ElasticDataLoader, ElasticStreamLoader

pytestmark = [pytest.mark.needs(what="torch")]

N, BATCH = 23, 6


class Stream(IterableDataset[int]):
    """As that of Hugging Face: a state counts in its own epoch only, and loading takes effect in the next `iter`."""

    def __init__(self, n: int = N) -> None:
        self.n = n
        self.epoch = 0
        self._at: dict[str, int] = {"epoch": 0, "i": 0}
        self._start: dict[str, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return self._at

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state

    def order(self, epoch: int) -> list[int]:
        found: list[int] = np.random.default_rng(epoch).permutation(self.n).tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        resumed = self._start is not None and self._start["epoch"] == self.epoch
        self._at = {"epoch": self.epoch, "i": self._start["i"] if resumed and self._start else 0}
        for i in range(self._at["i"], self.n):
            self._at["i"] = i + 1
            yield self.order(self.epoch)[i]


class OfOneOrder(IterableDataset[int]):
    """As in torchdata's documentation: without epochs, with a tensor in its state, and begun anew by its own end."""

    def __init__(self, n: int = N) -> None:
        self._n, self._i = n, 0
        self._generator = torch.Generator()

    def state_dict(self) -> dict[str, Any]:
        return {"i": self._i, "rng": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._i = state["i"]
        self._generator.set_state(state["rng"])

    def order(self, _: int) -> list[int]:
        return list(range(self._n))

    def __iter__(self) -> Iterator[int]:
        while self._i < self._n:
            self._i += 1
            yield self._i - 1
        self._i = 0


class At:
    """A rank's step, with what the loader asks of it."""

    number = 1

    def __init__(self, rank: int = 0, world: int = 1, generation: int = 1) -> None:
        self.rank, self.world, self.generation = rank, world, generation
        self.weight = -1.0

    def count(self, weight: float, of: Any) -> None:
        assert isinstance(of, ElasticStreamLoader)
        self.weight = weight


def at(*place: int) -> Any:
    return At(*place)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("n", [23, 24])
def test_each_epoch_reads_each_sample_once(n: int, workers: int) -> None:
    stream, used, weights = Stream(n), list[list[int]](), []
    with ElasticStreamLoader(stream, BATCH, num_workers=workers) as loader, paceline.join() as session:
        state = paceline.TrainState(data=loader)
        for step in session.steps(state, total=12):
            with step:
                with pytest.raises(UnsupportedOp, match="has no sampler"):
                    _ = step.weight
                used.append(loader.batch(step).tolist())
                weights.append(step.weight)
    assert [len(batch) for batch in used] == [6, 6, 6, n - 18] * 3
    assert list(chain(*used)) == [index for epoch in range(3) for index in stream.order(epoch)]
    assert weights == [1.0] * 12


@pytest.mark.parametrize("kind", [Stream, OfOneOrder])
@pytest.mark.parametrize("n", [23, 24])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_follow_world_changes_undone_steps_and_newcomers(workers: int, n: int, kind: Any) -> None:
    """As in a line: each generation begins at one position, which newcomers are given, and undone steps go back to."""
    used = list[int]()
    with ExitStack() as stack:

        def member() -> tuple[ElasticStreamLoader, paceline.TrainState]:
            loader = stack.enter_context(ElasticStreamLoader(kind(n), BATCH, num_workers=workers))
            return loader, paceline.TrainState(data=loader)

        members = [member() for _ in range(3)]
        begin = members[0][1].state_dict()
        # By generation its world, who is new, and which steps count.
        plan = [(2, [], [0]), (2, [], [1, 0]), (3, [1], [0]), (3, [], [1, 1, 0]), (1, [], [1, 1]), (3, [0, 2], [1, 0])]
        for generation, (world, new, counts) in enumerate(plan):
            for rank in new:
                members[rank] = member()
            for _, state in members[:world]:
                state.load_state_dict(begin)
            for counted in counts:
                steps = [at(rank, world, generation) for rank in range(world)]
                found = [loader.batch(step).tolist() for (loader, _), step in zip(members, steps, strict=False)]
                mine = list(chain(*(batch for step, batch in zip(steps, found, strict=True) if step.weight)))
                assert sum(step.weight for step in steps) == pytest.approx(1.0)
                assert [step.weight for step in steps] == pytest.approx(
                    [len(batch) / len(mine) if step.weight else 0 for step, batch in zip(steps, found, strict=True)]
                )
                ends = [repr(state.state_dict()) for _, state in members[:world]]
                assert len(set(ends)) == 1, "the position is one for all"
                if counted:
                    used += mine
                    begin = members[0][1].state_dict()
                # the others are put back when the next generation begins
    stream = kind(n)
    assert used == [*stream.order(0), *stream.order(1)][: len(used)]
    assert len(used) == min(6 * BATCH, n + 2 * BATCH)


def test_dataset_state_keeps_its_types_in_a_round_trip() -> None:
    with ElasticStreamLoader(OfOneOrder(), BATCH) as loader, ElasticStreamLoader(OfOneOrder(), BATCH) as other:
        loader.batch(at())
        there = paceline.TrainState(data=other)
        there._core.check_round_trip()
        there.load_state_dict(paceline.TrainState(data=loader).state_dict())
        assert other.batch(at()).tolist() == list(range(BATCH, 2 * BATCH))


def test_samples_read_ahead_are_discarded_when_the_world_changes() -> None:
    read = multiprocessing.get_context("fork").SimpleQueue()

    class Told(Stream):
        def __iter__(self) -> Iterator[int]:
            for sample in super().__iter__():
                read.put(sample)
                yield sample

    order = Stream().order(0)
    with ElasticStreamLoader(Told(), BATCH, num_workers=1) as loader:
        assert loader.batch(at(0, 2)).tolist() == order[:3]
        assert [read.get() for _ in range(BATCH + 1)] == order[: BATCH + 1], "the next batch is read unasked"
        assert loader.batch(at(0, 2)).tolist() == order[6:9]
        begin = loader.state_dict()
        assert loader.batch(at(0, 3, 2)).tolist() == order[12:14], "fewer rows in the next generation"
        loader.load_state_dict(begin)
        assert loader.batch(at(0, 3, 2)).tolist() == order[12:14], "and again, if the step is undone"
        assert loader.batch(at(0, 3, 2)).tolist() == order[18:19]


def test_members_and_newcomers_read_alike_after_a_lost_shuffle_buffer() -> None:
    """A member that goes on and a newcomer begin a generation alike, though the dataset's state is not all of it."""

    class Buffered(Stream):
        def __iter__(self) -> Iterator[int]:
            samples = super().__iter__()
            buffer = [next(samples), next(samples)]
            for sample in samples:
                yield buffer.pop(0)
                buffer.append(sample)
            yield from buffer

    with ElasticStreamLoader(Buffered(), 3) as veteran, ElasticStreamLoader(Buffered(), 3) as newcomer:
        veteran.batch(at(0, 1, 1))
        newcomer.load_state_dict(veteran.state_dict())
        assert veteran.batch(at(0, 1, 2)).tolist() == newcomer.batch(at(0, 1, 2)).tolist()
        assert veteran.state_dict() == newcomer.state_dict()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_retried_step_sees_the_same_random_transforms(workers: int) -> None:
    class Noisy(Stream):
        def __iter__(self) -> Iterator[Any]:
            for sample in super().__iter__():
                yield sample, random.random(), np.random.random(), torch.rand(())

    found = []
    with ElasticStreamLoader(Noisy(), BATCH, num_workers=workers) as loader:
        for generation in (1, 1, 2):
            begin = loader.state_dict()
            found.append([column.tolist() for column in loader.batch(at(0, 1, generation))])
        loader.load_state_dict(begin)
        assert [column.tolist() for column in loader.batch(at(0, 1, 3))] == found[2]
    assert found[0][1] != found[1][1]
    with ElasticStreamLoader(Noisy(), BATCH, seed=1) as other:
        assert other.batch(at())[1].tolist() != found[0][1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_error_undoes_the_step_and_reading_can_continue(workers: int) -> None:
    class Broken(Stream):
        def __iter__(self) -> Iterator[int]:
            for count, sample in enumerate(super().__iter__()):
                if count == 8:
                    raise LookupError("sample 8 is damaged")
                yield sample

    with ElasticStreamLoader(Broken(), BATCH, num_workers=workers) as loader, paceline.join() as session:
        state, counted = paceline.TrainState(data=loader), []

        def train() -> None:
            for step in session.steps(state, total=8):
                with step:
                    loader.batch(step)
                counted.append(step.number)

        with pytest.raises(LookupError, match="sample 8 is damaged"):
            train()
        assert counted == [1]
        assert loader.state_dict()["batches"] == 1, "the step is undone"
        assert not multiprocessing.active_children(), "an error ends the worker too"
        assert loader.batch(at()).tolist() == Stream().order(0)[6:12], "from there it gets further"
    assert not multiprocessing.active_children()


class Killed(Stream):
    """The process that reads it is killed."""

    def __iter__(self) -> Iterator[int]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield from ()


class Ends(Dataset[int]):
    """The process that reads it ends."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        os._exit(3)


def test_a_dead_worker_process_raises_data_worker_lost() -> None:
    with ElasticStreamLoader(Killed(), BATCH, num_workers=1) as loader:
        (worker,) = multiprocessing.active_children()
        with pytest.raises(DataWorkerLost, match=f"rank 2 on .*: process {worker.pid}, .* killed by SIGKILL") as found:
            loader.batch(at(2, 4))
        assert found.value.ranks == (2,)
        assert not multiprocessing.active_children()
    sampler = paceline.ElasticSampler(N, BATCH)
    state = paceline.TrainState(sampler=sampler)
    with ElasticDataLoader(Ends(), num_workers=1) as other, paceline.join() as session:

        def train() -> None:
            for step in session.steps(state, total=1):
                with step:
                    other.batch(step)

        with pytest.raises(DataWorkerLost, match="ended with exit code 3"):
            train()


CTRL_C = """
    import signal, sys, time
    import paceline, paceline.torch
    sys.path.insert(0, sys.argv[1])
    from test_stream_loader import Stream

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so do theirs

    class Slow(Stream):
        def __iter__(self):
            for count, sample in enumerate(super().__iter__()):
                if count == 6:
                    print("reading", flush=True)
                    time.sleep(600)
                yield sample

    with paceline.torch.ElasticStreamLoader(Slow(), 6, num_workers=1) as loader, paceline.join() as session:
        for step in session.steps(paceline.TrainState(data=loader), total=2):
            with step:
                loader.batch(step)
"""


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    """The output ends when nobody is left that could write to it."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(CTRL_C))
    with subprocess.Popen(
        [sys.executable, str(script), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, said
    assert said.count("Traceback") == 1, said
    assert said.endswith("KeyboardInterrupt\n"), said


def test_the_worker_ends_on_exit_and_close() -> None:
    with ElasticStreamLoader(Stream(), BATCH, num_workers=1) as loader:
        assert len(multiprocessing.active_children()) == 1, "it starts with the loader"
        loader.batch(at())
    assert not multiprocessing.active_children()
    assert loader.batch(at()).tolist() == Stream().order(0)[6:12], "and again, if it is used again"
    loader.close()
    loader.close()
    assert not multiprocessing.active_children()


def test_settings_are_passed_on_or_refused() -> None:
    with ElasticStreamLoader(Stream(), BATCH, collate_fn=len) as loader:
        assert loader.batch(at(1, 4)) == 2
    for refused in ("generator", "batch_sampler", "persistent_workers"):
        with pytest.raises(TypeError, match=refused):
            ElasticStreamLoader(Stream(), BATCH, **{refused: None})
    for size, workers, seed in ((0, 0, 0), (6, 2, 0), (6, 0, -1)):
        with pytest.raises(ValueError, match=f"not {size}, {workers}, 0 and {seed}"):
            ElasticStreamLoader(Stream(), size, num_workers=workers, seed=seed)


def test_misuse_of_the_loader_is_refused() -> None:
    class Mute(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(N))

    with pytest.raises(UnsupportedOp, match=r"use paceline\.torch\.ElasticStreamLoader"):
        ElasticDataLoader(Mute())
    with pytest.raises(UnsupportedOp, match="Mute has no state_dict and no load_state_dict"):
        ElasticStreamLoader(Mute(), BATCH)
    with pytest.raises(UnsupportedOp, match="Stream gave no sample in epoch 1"):
        ElasticStreamLoader(Stream(0), BATCH).batch(at())

    class Stuck(Stream):
        def state_dict(self) -> dict[str, int]:
            return {"i": 0}

    loader = ElasticStreamLoader(Stuck(), BATCH)
    loader.batch(at())
    with pytest.raises(UnsupportedOp, match=r"Stuck.state_dict\(\) has not changed in 6 samples"):
        loader.batch(at())

    late = ElasticStreamLoader(Stream(), BATCH)
    late.batch(at())
    other = ElasticStreamLoader(Stream(), BATCH)
    other.load_state_dict(late.state_dict())
    other.batch(at())
    other.load_state_dict(ElasticStreamLoader(Stream(), BATCH).state_dict())
    with pytest.raises(UnsupportedOp, match="Stream was not read from its beginning"):
        other.batch(at())


def test_a_step_gets_one_batch_from_a_loader_in_its_state() -> None:
    loader, sampler = ElasticStreamLoader(Stream(), BATCH), paceline.ElasticSampler(N, BATCH)
    for parts, error in [
        ({"notes": {}}, "is no part of the training state"),
        ({"data": loader, "sampler": sampler}, "has a sampler beside this ElasticStreamLoader"),
    ]:
        with paceline.join() as session:
            for step in session.steps(paceline.TrainState(**parts), total=1):
                with step, pytest.raises(UnsupportedOp, match=error):
                    loader.batch(step)
    with paceline.join() as session:
        for step in session.steps(paceline.TrainState(data=loader), total=1):
            with step:
                loader.batch(step)
                with pytest.raises(StepOrderError, match="step 1 already has its batch"):
                    loader.batch(step)
            with pytest.raises(StepOrderError, match="step 1 is over"):
                loader.batch(step)
    assert loader.state_dict()["batches"] == 1, "what is refused does not move it"


def test_a_different_batch_size_is_named_as_the_difference() -> None:
    from paceline._elastic.differences import difference
    from paceline._links.base import Peer

    here, there = (
        paceline.TrainState(data=ElasticStreamLoader(Stream(), size))._core.manifest() for size in (BATCH, 2 * BATCH)
    )
    error = difference(here, there, Peer("m", 1, "host-b"))
    assert "data is a stream with global_batch=6, seed=0 here but a stream with global_batch=12, seed=0" in str(error)
