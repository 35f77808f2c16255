"""A stream in shards, each of which one rank reads: what a worker process reads, and what all ranks know of it.

A shard is read in chunks, and its dataset's state is noted before each: a *mark*. Between steps all ranks know a mark
of each shard, how many samples were taken, and how many are known to come (`ShardTurns`). With that any rank can read
the shard on, so nothing has to be asked of a rank that is lost. When a step needs more samples than are known, the
readers read on and tell all ranks, by one collective for many steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline._collectives.objects import decode_object, encode_object
from paceline._elastic import foreign
from paceline._elastic.foreign import to_plain
from paceline._elastic.step import Step
from paceline.errors import UnsupportedOp
from paceline.torch._fetching import Fetcher, sow
from paceline.torch._shard_turns import ShardTurns

_log = logging.getLogger(__name__)

_CHUNK_STEPS = 8
"""Steps for which a chunk lasts, if no window for shuffling sets its size: the more, the fewer collectives."""

_BATCH, _CHUNK, _WINDOW = 0, 1, 2
"""Numbers in the seeds of collation, of what the dataset draws, and of the order in a window."""


class StreamMark(NamedTuple):
    """A place at which a shard can be read on."""

    at: int
    """Number of the shard's samples before it, in this epoch."""
    state: bytes
    """The dataset's state there; empty for the beginning of an epoch."""


BEGINNING = StreamMark(0, b"")


class _Goal(NamedTuple):
    """Where a rank begins to read a shard."""

    shard: int
    taken: int
    mark: StreamMark | None
    """None if all its samples are taken."""


class _Task(NamedTuple):
    """A task of a rank's reader: its part of a step, or to read ahead between two steps."""

    epoch: int
    begin: Sequence[_Goal] | None = None
    """The shards that this rank reads from now on; None if they are the same as before."""
    take: Sequence[tuple[int, int]] = ()
    """Shards and numbers of samples: the rank's part of a step."""
    batch: int = 0
    """Number of the batch, which seeds its collation."""
    until: Sequence[tuple[int, int]] | None = None
    """If given, there is no step: reads on until so many samples of these shards are known, and tells of them."""


_Found = tuple[int, int, bool, int, bytes]
"""How far a shard was read: its number, how many samples are known, whether it has ended there, and a `StreamMark`."""


class _Chunk(NamedTuple):
    mark: StreamMark
    samples: Sequence[Any]


@dataclass(slots=True, eq=False)
class _Shard:
    """A shard as its reader has it."""

    stream: Any
    number: int
    beginning: Any = None
    """The dataset's state before it was read."""
    epoch: int = -1
    iterator: Iterator[Any] = field(default_factory=lambda: iter(()))
    chunks: deque[_Chunk] = field(default_factory=deque)
    end: StreamMark = BEGINNING
    """Where the last chunk ends."""
    taken: int = 0
    ended: bool = False

    @property
    def left(self) -> int:
        """The number of samples that were read and not taken."""
        return self.end.at - self.taken

    def leave(self) -> None:
        """Forgets what was read."""
        self.epoch, self.iterator = -1, iter(())
        self.chunks.clear()


class ShardReader:
    """Reads a rank's shards; a `SampleSource`."""

    def __init__(
        self,
        streams: Sequence[Any],
        chunk: int,
        *,
        shuffles: bool,
        seed: int,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._shards = [_Shard(stream, number) for number, stream in enumerate(streams)]
        self._chunk = chunk
        self._shuffles = shuffles
        self._seed = seed
        self._collate = collate
        self._own: Sequence[_Shard] = ()
        self._behind = 0
        """How many samples to read on."""
        self._spare: Any = None
        """A sample for a rank that has none in a step."""

    def fetch(self, task: _Task, check: Callable[[], None]) -> Any:
        """See `SampleSource`: a collated part of a batch, or what was found ahead."""
        if task.begin is not None:
            self._begin(task.epoch, task.begin)
        if task.until is not None:
            return [self._read_until(task.epoch, self._shards[number], until, check) for number, until in task.until]
        samples = [sample for number, count in task.take for sample in self._take(self._shards[number], count, check)]
        self._read_on(len(samples), check)
        sow(self._seed, _BATCH, task.batch, task.take[0][0] if task.take else len(self._shards))
        return self._collate(samples or [self._any_sample(check)])

    def _begin(self, epoch: int, goals: Sequence[_Goal]) -> None:
        """Reads these shards from now on, and no others."""
        mine = {goal.shard for goal in goals}
        for shard in self._shards:
            if shard.number not in mine:
                shard.leave()
        for goal in goals:
            self._go_to(epoch, goal)
        self._own = [self._shards[goal.shard] for goal in goals]
        self._behind = 0

    def _go_to(self, epoch: int, goal: _Goal) -> None:
        """Goes to a place in a shard, without reading what is still there from before."""
        shard = self._shards[goal.shard]
        here = shard.epoch == epoch and shard.chunks and shard.chunks[0].mark.at <= goal.taken
        if goal.mark is None:
            shard.leave()
            shard.epoch, shard.ended = epoch, True
        elif not (here and shard.end.at >= goal.mark.at):
            self._load(shard, epoch, goal.mark)
        shard.taken = goal.taken

    def _load(self, shard: _Shard, epoch: int, mark: StreamMark) -> None:
        """Begins to read at a mark."""
        stream = shard.stream
        shard.leave()  # until it has begun
        if shard.beginning is None:
            shard.beginning = encode_object(to_plain(stream.state_dict()))
        if callable(set_epoch := getattr(stream, "set_epoch", None)):
            set_epoch(epoch)
        stream.load_state_dict(foreign.taken(decode_object(mark.state or shard.beginning), None))
        shard.iterator = iter(stream)
        shard.end, shard.taken, shard.ended = mark, mark.at, False
        shard.epoch = epoch

    def _read_chunk(self, shard: _Shard, check: Callable[[], None]) -> None:
        stream, begin, samples = shard.stream, shard.end, list[Any]()
        place = (shard.epoch, shard.number, begin.at)
        epoch, shard.epoch = shard.epoch, -1  # if this raises, the shard is read from a mark next time
        sow(self._seed, _CHUNK, *place)
        for sample in shard.iterator:
            check()
            samples.append(sample)
            if len(samples) == self._chunk:
                break
        else:
            shard.ended = True
        state = b"" if shard.ended else encode_object(to_plain(stream.state_dict()))
        if not shard.ended and state == begin.state:
            raise UnsupportedOp(
                f"{type(stream).__name__}.state_dict() has not changed in {len(samples)} samples: it must contain the "
                "position"
            )
        if self._shuffles:
            order = np.random.default_rng((self._seed, _WINDOW, *place)).permutation(len(samples))
            samples = [samples[i] for i in order]
        shard.chunks.append(_Chunk(begin, samples))
        shard.end = StreamMark(begin.at + len(samples), state)
        shard.epoch = epoch

    def _read_until(self, epoch: int, shard: _Shard, until: int, check: Callable[[], None]) -> _Found:
        if shard.epoch != epoch:  # the one before is over
            self._load(shard, epoch, BEGINNING)
        while shard.end.at < until and not shard.ended:
            self._read_chunk(shard, check)
        places = [chunk.mark for chunk in shard.chunks if chunk.mark.at <= shard.taken]
        mark = places[-1] if places else shard.end  # nothing had to be read
        return shard.number, shard.end.at, shard.ended, *mark

    def _read_on(self, taken: int, check: Callable[[], None]) -> None:
        """Reads as many samples as were taken, a chunk at a time, so that no step has to wait for many chunks."""
        self._behind += taken
        while self._behind >= self._chunk:
            self._behind -= self._chunk
            shard = min((shard for shard in self._own if not shard.ended), key=lambda shard: shard.left, default=None)
            if shard is not None and shard.left < 2 * self._chunk:
                self._read_chunk(shard, check)

    def _take(self, shard: _Shard, count: int, check: Callable[[], None]) -> list[Any]:
        """Returns the next samples of a shard, and drops chunks before the last one that was used up."""
        while shard.left < count:
            if shard.ended:
                raise UnsupportedOp(
                    f"{type(shard.stream).__name__} gave {shard.end.at} samples of shard {shard.number} in epoch "
                    f"{shard.epoch}, and more when it was read before: after load_state_dict it must give the same"
                )
            self._read_chunk(shard, check)
        found: list[Any] = []
        for chunk in shard.chunks:
            begin = max(shard.taken - chunk.mark.at, 0)
            found += chunk.samples[begin : begin + count - len(found)] if begin < len(chunk.samples) else []
        shard.taken += count
        while len(shard.chunks) > 2 and shard.chunks[2].mark.at <= shard.taken:
            shard.chunks.popleft()
        return found

    def _any_sample(self, check: Callable[[], None]) -> Any:
        """Returns a sample, which counts nothing, for a rank that has none in a step."""
        for shard in [*self._own, *self._shards]:
            if self._spare is not None:
                break
            check()
            if shard.chunks or (shard in self._own and not shard.ended):  # its place must stay
                if not shard.chunks:
                    self._read_chunk(shard, check)
                self._spare = next((sample for chunk in shard.chunks for sample in chunk.samples), None)
            else:
                self._load(shard, 0, BEGINNING)
                self._spare = next(shard.iterator, None)
                shard.leave()
        if self._spare is None:
            raise UnsupportedOp("all shards of the stream are empty")
        return self._spare


class SharedStreams:
    """The streams of an `ElasticStreamLoader` that has several: each is read by one rank."""

    def __init__(
        self,
        streams: Sequence[Any],
        global_batch: int,
        *,
        num_workers: int,
        shuffle: int,
        seed: int,
        collate: Callable[[list[Any]], Any],
        settings: Mapping[str, Any],
    ) -> None:
        self._size = global_batch
        self._order = {"shards": len(streams), "shuffle": shuffle, "seed": seed}
        chunk = shuffle or -(-_CHUNK_STEPS * global_batch // len(streams))
        reader = ShardReader(streams, chunk, shuffles=shuffle > 0, seed=seed, collate=collate)
        self._fetcher = Fetcher(reader, num_workers, settings)
        self._turns = ShardTurns.begin(len(streams))
        self._set_marks([BEGINNING] * len(streams))
        self._batches = 0
        """Number of batches since the first epoch began."""
        self._where: tuple[int, int, int] | None = None
        """Generation, rank and world that the reader works for; None if it has to begin anew."""
        self._has_plan = False

    def batch(self, step: Step, of: object) -> Any:
        """Returns this rank's part of the step's samples, collated, and counts its weight."""
        step._check_source(of)
        shares = self._shares(step)
        batch = self._fetch(step)
        step.count(float(shares[step.rank :: step.world].sum() / shares.sum()), of=of)
        self._turns, self._batches = self._turns.after(shares), self._batches + 1
        return batch

    def _shares(self, step: Step) -> NDArray[np.int64]:
        """Returns how many samples each shard gives to this step, and begins the next epoch if that is due."""
        while True:
            shares = self._turns.share_out(self._size)
            if shares is None:
                self._learn(step._group.all_gather_object(self._fetch(step)))
            elif shares.any():
                return shares
            elif not self._turns.taken.any():
                raise UnsupportedOp(f"all shards of the stream are empty in epoch {self._turns.epoch}")
            else:
                self._turns = ShardTurns.begin(len(self._marks), self._turns.epoch + 1)
                self._set_marks([BEGINNING] * len(self._marks))

    def state_dict(self) -> dict[str, Any]:
        """Returns what all ranks know."""
        turns = self._turns
        return {
            **self._order,
            "epoch": turns.epoch,
            "turn": turns.turn,
            "batches": self._batches,
            "counts": np.stack([turns.taken, turns.known, turns.ended]),
            "marks": self._ends,
            "states": self._states,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes to where all ranks were."""
        if "shards" not in saved:
            raise UnsupportedOp("the position was saved by a loader of one stream, and this one has a list of streams")
        order = {name: saved.get(name) for name in self._order}
        if order != self._order:
            raise UnsupportedOp(
                f"the position was saved with {_in_words(order)}, and this stream has {_in_words(self._order)}: its "
                "samples come in another order"
            )
        self._turns = ShardTurns(saved["epoch"], saved["turn"], *np.array(saved["counts"], np.int64))
        places, ends = saved["marks"].tolist()
        states = saved["states"].tobytes()
        self._set_marks(
            [StreamMark(at, states[begin:end]) for at, (begin, end) in zip(places, pairwise([0, *ends]), strict=True)]
        )
        self._batches = saved["batches"]
        self._where = None

    def close(self) -> None:
        """Ends the worker process."""
        self._where = None
        self._fetcher.close()

    def _fetch(self, step: Step) -> Any:
        """Returns the result of the next task."""
        where, before = (step.generation, step.rank, step.world), self._where
        self._where = None  # if this raises, the reader begins anew
        tasks = None
        if where != before or not self._has_plan:
            tasks = self._plan(step.rank, step.world, begins=where != before)
            self._has_plan = True
        found = self._fetcher.next(step.rank, tasks)
        self._where = where
        return found

    def _plan(self, rank: int, world: int, *, begins: bool) -> Iterator[_Task]:
        """Yields the tasks of the next steps, until one depends on samples that are not known."""
        turns, own = self._turns, range(rank, len(self._marks), world)
        begin = None
        if begins:
            if not own:
                _log.warning(
                    "rank %d has no samples: the stream has %d shards for %d ranks", rank, len(self._marks), world
                )
            begin = [
                _Goal(shard, int(turns.taken[shard]), None if turns.finished[shard] else self._marks[shard])
                for shard in own
            ]
        number = self._batches
        while (shares := turns.share_out(self._size)) is not None and shares.any():
            take = [(shard, int(shares[shard])) for shard in own if shares[shard]]
            yield _Task(turns.epoch, begin, take, number)
            begin, turns, number = None, turns.after(shares), number + 1
        if turns.is_over:
            turns = ShardTurns.begin(len(self._marks), turns.epoch + 1)
        wanted = turns.wanted(self._size, _CHUNK_STEPS)
        until = [(shard, int(wanted[shard])) for shard in own if not turns.finished[shard]]
        yield _Task(turns.epoch, begin, until=until)

    def _learn(self, found: Sequence[Sequence[_Found]]) -> None:
        """Takes in what the readers of all ranks have found."""
        known, ended = np.zeros((2, len(self._marks)), np.int64)
        marks = list(self._marks)
        for shard, number, is_all, at, state in chain(*found):
            known[shard], ended[shard], marks[shard] = number, is_all, StreamMark(at, state)
        self._set_marks(marks)
        self._turns = self._turns.learned(known, ended)
        self._has_plan = False

    def _set_marks(self, marks: Sequence[StreamMark]) -> None:
        """Sets the marks, and the arrays that the training state has of them, which are copied in every step."""
        self._marks = marks
        ends = np.cumsum([len(mark.state) for mark in marks])
        self._ends = np.stack([[mark.at for mark in marks], ends])
        self._states = np.frombuffer(b"".join(mark.state for mark in marks), np.uint8)


def _in_words(order: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in order.items())
