"""`ElasticStreamLoader`: batches of a stream whose position is part of the training state, while ranks come and go.

Samples of a stream have no numbers by which to share them out. So every rank reads the same stream, and keeps its part
of each global batch. One position for all ranks is undone with a step, given to newcomers and kept in checkpoints: the
dataset's own state after the last batch. As a part of the `TrainState` without a gate, it is copied when a step begins,
and restored when the step is undone (I6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from torch.utils.data import default_collate

from paceline._elastic.foreign import taken, to_plain
from paceline._elastic.parts import StatePart, opaque
from paceline._elastic.sampler import share_out
from paceline._elastic.step import Step
from paceline.checkpoint.tree import split
from paceline.errors import UnsupportedOp
from paceline.torch._fetching import Fetcher, sow


class ElasticStreamLoader:
    """Gives each step its part of a stream; with a worker process, fetches it ahead of time.

        loader = paceline.torch.ElasticStreamLoader(stream, global_batch=256, num_workers=1)
        with loader, paceline.join() as session:
            state = paceline.TrainState(model=model, optimizer=optimizer, data=loader)
            for step in session.steps(state, total=1000):
                with step:
                    x, t = loader.batch(step)
                    ...

    The loader is a part of the `TrainState`, in place of a sampler. A step takes the next `global_batch` samples of
    the stream, or the b that are left at the end of an epoch. Rank r of W gets those from r b // W to (r + 1) b // W;
    `step.weight` is its fraction of b. So each sample of an epoch counts once, even if workers die, freeze, join or
    leave. When the stream ends, the next epoch begins, with `dataset.set_epoch(n)` if the dataset has that.

    **The dataset** is iterable, with `state_dict()` and `load_state_dict()` as in Hugging Face's `IterableDataset`, and
    as torchdata's `StatefulDataLoader` needs them. After `load_state_dict(state)` the next `iter(dataset)` continues
    after the sample at which `state_dict()` returned `state`, with the same samples on every rank. Pass the dataset at
    its beginning. Its state must contain everything that decides which samples come, including the order of shuffling.
    A shuffle buffer whose content is not in the state, as in Hugging Face's `shuffle`, is lost whenever ranks change.

    **Every rank reads the whole stream**: with W ranks each sample is read W times, and used once. If reading is
    expensive, a map-style dataset with `ElasticDataLoader` reads each sample once.

    Random transforms draw from generators that are seeded by `seed` and the number of the batch, so a step that is
    repeated sees the same. In each generation all ranks load the position again, and drop what was fetched before.

    Args:
        dataset: the stream, the same on every rank; not shared out already by rank or world.
        global_batch: number of samples in a step, of all ranks together.
        num_workers: 1 for a process that reads ahead, 0 to read when `batch` is called. The process starts here: make
            the loader before `paceline.join()`.
        seed: the seed of random transforms.
        settings: `collate_fn`, and further arguments of `torch.utils.data.DataLoader`, as for `ElasticDataLoader`.

    Raises:
        UnsupportedOp: the dataset cannot tell its position.
        ValueError: a number is out of range, or, like `TypeError`, `settings` has an argument that is refused.
    """

    def __init__(
        self, dataset: Any, global_batch: int, *, num_workers: int = 0, seed: int = 0, **settings: Any
    ) -> None:
        if missing := [name for name in _PROTOCOL if not callable(getattr(dataset, name, None))]:
            raise UnsupportedOp(
                f"{type(dataset).__name__} has no {' and no '.join(missing)}: a stream must be able to save its "
                "position, so that it can resume there when workers come and go"
            )
        if global_batch < 1 or num_workers not in (0, 1) or seed < 0:
            raise ValueError(
                f"want global_batch >= 1, num_workers 0 or 1 (a stream is read in order) and seed >= 0, not "
                f"{global_batch}, {num_workers} and {seed}"
            )
        self._kind = f"stream with global_batch={global_batch}, seed={seed}"
        collate = settings.pop("collate_fn", None) or default_collate
        reader = _Reader(dataset, global_batch, seed, collate)
        self._fetcher = Fetcher(reader, num_workers, {**settings, "collate_fn": _as_it_is})
        self._position = _Position(0, 0, False, None)
        self._ahead: tuple[int, int, int] | None = None
        """Generation, rank and world for which batches after the position are fetched; None if none are."""

    def batch(self, step: Step) -> Any:
        """Returns this rank's samples of the step, collated. A rank without a sample gets one, of weight 0.

        Call this once in each attempt at a step, inside its block.

        Raises:
            StepOrderError: the step is over, or already has a batch.
            UnsupportedOp: the training state lacks this loader, or has a sampler too; or the stream is empty.
            DataWorkerLost: the worker process has died.
            Exception: the dataset or its collation raised it. The worker process is then closed, and a new one starts
                if `batch` is called again.
        """
        wanted, tasks = (step.generation, step.rank, step.world), None
        if wanted != self._ahead:  # true in every generation: all ranks load the position that a newcomer loads
            share = (step.rank, step.world)
            tasks = chain([_Task(self._position, *share)], repeat(_Task(None, *share)))
        self._ahead = None
        found: _Fetched = self._fetcher.next(step.rank, tasks)
        step.count(found.weight, of=self)
        self._position, self._ahead = found.position, wanted
        return found.batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, which moves with each batch that `batch` returns."""
        return self._position._asdict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes to a position. The next `batch` throws away what was fetched ahead."""
        self._position, self._ahead = _Position(**saved), None

    def as_part(self) -> StatePart:
        """Returns the part of a training state (see `_elastic.parts.part_of`); refuses another batch size or seed."""
        return opaque(self, self._kind)

    def close(self) -> None:
        """Ends the worker process. Idempotent; `batch` starts a new one."""
        self._ahead = None
        self._fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_PROTOCOL = ("__iter__", "state_dict", "load_state_dict")


class _Position(NamedTuple):
    """A position in the stream, between two batches."""

    epoch: int
    batches: int
    """Number of batches read since the first epoch began."""
    ended: bool
    """True if the epoch is over: the next batch is the first one of the next epoch."""
    state: Any
    """The dataset's state in that epoch, as `foreign.to_plain` returns it; None before the first read."""


class _Task(NamedTuple):
    """A batch to read."""

    begin: _Position | None
    """The position to begin at; None for the end of the last batch."""
    rank: int
    world: int


class _Fetched(NamedTuple):
    """The result of a task."""

    batch: Any
    weight: float
    position: _Position
    """The position after the batch."""


class _Reader:
    """Reads the stream, and cuts this rank's part out of each global batch."""

    def __init__(self, dataset: Any, global_batch: int, seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._size = global_batch
        self._seed = seed
        self._collate = collate
        self._beginning: Any = None
        """The dataset's state before it was read."""
        self._was_read = False
        self._iterator: Iterator[Any] = iter(())
        self._at = _Position(0, 0, False, None)

    def fetch(self, task: _Task, check: Callable[[], None]) -> _Fetched:
        """See `SampleSource`."""
        if task.begin is not None:
            self._go_to(task.begin)
        before = self._at
        sow(self._seed, before.batches)
        samples = self._read(check) or self._read(check)  # the epoch may have ended with the last batch: try the next
        name = type(self._dataset).__name__
        if not samples:
            raise UnsupportedOp(f"{name} gave no sample in epoch {self._at.epoch}: iter(dataset) must start over")
        state = to_plain(self._dataset.state_dict())
        if not self._at.ended and before.epoch == self._at.epoch and _same(state, before.state):
            raise UnsupportedOp(
                f"{name}.state_dict() has not changed in {len(samples)} samples: it must contain the position"
            )
        self._at = self._at._replace(batches=before.batches + 1, state=state)
        mine, weight = share_out(np.arange(len(samples)), task.rank, task.world)
        return _Fetched(self._collate([samples[i] for i in mine]), weight, self._at)

    def _go_to(self, position: _Position) -> None:
        self._set_epoch(position.epoch)
        if position.state is not None:
            self._dataset.load_state_dict(taken(position.state, None))
        elif self._beginning is not None:
            self._dataset.load_state_dict(taken(self._beginning, None))
        elif not self._was_read:
            self._beginning = to_plain(self._dataset.state_dict())
        else:
            raise UnsupportedOp(
                f"{type(self._dataset).__name__} was not read from its beginning, so it cannot return there"
            )
        self._was_read = True
        self._iterator = iter(self._dataset)
        self._at = position

    def _read(self, check: Callable[[], None]) -> list[Any]:
        """Returns the next samples: as many as a batch has, or as are left of the epoch."""
        if self._at.ended:
            self._at = self._at._replace(epoch=self._at.epoch + 1, ended=False)
            self._set_epoch(self._at.epoch)
            self._iterator = iter(self._dataset)
        samples: list[Any] = []
        while len(samples) < self._size:
            check()
            try:
                samples.append(next(self._iterator))
            except StopIteration:
                self._at = self._at._replace(ended=True)
                break
        return samples

    def _set_epoch(self, epoch: int) -> None:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _same(a: Any, b: Any) -> bool:
    (tree, arrays), (other_tree, others) = split(a), split(b)
    return tree == other_tree and all(np.array_equal(array, others[name]) for name, array in arrays.items())


def _as_it_is(fetched: Any) -> Any:
    """Returns its argument; takes the place of torch's collation, because the reader has collated already."""
    return fetched
