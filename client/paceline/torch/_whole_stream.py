"""One stream for all ranks: each reads all of it, and keeps its part of each global batch.

Samples of a stream have no numbers by which to share them out. One position for all ranks is undone with a step, given
to newcomers and kept in checkpoints: the dataset's own state after the last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np

from paceline._elastic.foreign import taken, to_plain
from paceline._elastic.sampler import share_out
from paceline._elastic.step import Step
from paceline.checkpoint.tree import split
from paceline.errors import UnsupportedOp
from paceline.torch._fetching import Fetcher, sow


class WholeStream:
    """The stream of an `ElasticStreamLoader` that has one: every rank reads all of it."""

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        *,
        num_workers: int,
        seed: int,
        collate: Callable[[list[Any]], Any],
        settings: Mapping[str, Any],
    ) -> None:
        self._fetcher = Fetcher(_Reader(dataset, global_batch, seed, collate), num_workers, settings)
        self._position = _Position(0, 0, False, None)
        self._ahead: tuple[int, int, int] | None = None
        """Generation, rank and world for which batches after the position are fetched; None if none are."""

    def batch(self, step: Step, of: object) -> Any:
        """Returns this rank's part of the step's samples, collated, and counts its weight."""
        wanted, tasks = (step.generation, step.rank, step.world), None
        if wanted != self._ahead:  # true in every generation: all ranks load the position that a newcomer loads
            share = (step.rank, step.world)
            tasks = chain([_Task(self._position, *share)], repeat(_Task(None, *share)))
        self._ahead = None
        found: _Fetched = self._fetcher.next(step.rank, tasks)
        step.count(found.weight, of=of)
        self._position, self._ahead = found.position, wanted
        return found.batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, which moves with each batch."""
        return self._position._asdict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes to a position. The next `batch` throws away what was fetched ahead."""
        if "shards" in saved:
            raise UnsupportedOp(
                f"the position was saved by a loader of {saved['shards']} streams, and this one has one"
            )
        self._position, self._ahead = _Position(**saved), None

    def close(self) -> None:
        """Ends the worker process."""
        self._ahead = None
        self._fetcher.close()


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
