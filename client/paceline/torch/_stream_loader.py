"""`ElasticStreamLoader`: batches of a stream whose position is part of the training state, while ranks come and go.

As a part of the `TrainState` without a gate, the position is copied when a step begins, and restored when the step is
undone (I6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from torch.utils.data import default_collate

from paceline._elastic.parts import StatePart, opaque
from paceline._elastic.step import Step
from paceline.errors import UnsupportedOp
from paceline.torch._stream_shards import SharedStreams
from paceline.torch._whole_stream import WholeStream


class ElasticStreamLoader:
    """Gives each step its part of a stream; with a worker process, fetches it ahead of time.

        shards = [stream.shard(num_shards=64, index=i) for i in range(64)]
        loader = paceline.torch.ElasticStreamLoader(shards, global_batch=256, num_workers=1)
        with loader, paceline.join() as session:
            state = paceline.TrainState(model=model, optimizer=optimizer, data=loader)
            for step in session.steps(state, total=1000):
                with step:
                    x, t = loader.batch(step)
                    ...

    The loader is a part of the `TrainState`, in place of a sampler. A step takes the next `global_batch` samples of
    the stream, or the b that are left at the end of an epoch. `step.weight` is this rank's fraction of b. So each
    sample of an epoch counts once, even if workers die, freeze, join or leave. When the stream ends, the next epoch
    begins, with `dataset.set_epoch(n)` if the dataset has that.

    **In shards**: each rank reads some of the shards, so each sample is read once. The shards take turns, one sample
    each, and one that has ended drops out; so a step has the same samples on any number of ranks. Of W ranks, rank r
    reads the shards r, r + W, r + 2W and so on. Take 8 or more for each rank, of about the same size. A rank has no
    sample in a step if there are fewer shards, or fewer samples in a step, than ranks. When few shards are left near
    the end of an epoch, some ranks have none, and others several times as many as usual; the last rank may have the
    whole global batch. When ranks come and go, the shards are shared out anew. A rank that takes over a shard reads
    up to 16 steps' samples of it again, or two windows of `shuffle` if that is more.

    **One stream** is read by every rank, which keeps its part of each global batch: with W ranks each sample is read W
    times, and used once.

    **Each dataset** is iterable, with `state_dict()` and `load_state_dict()` as in Hugging Face's `IterableDataset`,
    and as torchdata's `StatefulDataLoader` needs them. After `load_state_dict(state)` the next `iter(dataset)`
    continues after the sample at which `state_dict()` returned `state`, with the same samples on every rank. Pass the
    dataset at its beginning. Its state must contain everything that decides which samples come, including the order of
    shuffling. A shuffle buffer whose content is not in the state, as in Hugging Face's `shuffle`, is lost whenever
    ranks change: use `shuffle` here.

    Random transforms draw from generators that are seeded by `seed` and the place of the sample, so a repeated step
    sees the same. In shards, random collation is repeated only in the same world. In each generation all ranks go to
    the position again.

    Args:
        dataset: the stream, the same on every rank, and not shared out already by rank or world; or a list of streams,
            its shards.
        global_batch: number of samples in a step, of all ranks together.
        num_workers: 1 for a process that reads ahead, 0 to read when `batch` is called. The process starts here: make
            the loader before `paceline.join()`.
        shuffle: how many samples of a shard are read and put in a random order together, which follows from `seed` and
            the epoch; 0 to keep the order. Of each of its shards, a rank holds up to 24 steps' samples, or three
            windows if that is more.
        seed: the seed of random transforms, and of `shuffle`.
        settings: `collate_fn`, and further arguments of `torch.utils.data.DataLoader`, as for `ElasticDataLoader`.

    Raises:
        UnsupportedOp: a dataset cannot tell its position, or `shuffle` with a stream that is not in shards.
        ValueError: a number is out of range, or, like `TypeError`, `settings` has an argument that is refused.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        *,
        num_workers: int = 0,
        shuffle: int = 0,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        is_shared = isinstance(dataset, list | tuple)
        _check(dataset if is_shared else [dataset])
        if global_batch < 1 or num_workers not in (0, 1) or seed < 0 or shuffle < 0:
            raise ValueError(
                f"want global_batch >= 1, num_workers 0 or 1 (a stream is read in order), shuffle >= 0 and seed >= 0, "
                f"not {global_batch}, {num_workers}, {shuffle} and {seed}"
            )
        if shuffle and not is_shared:
            raise UnsupportedOp("shuffle needs a list of streams: with one only, pass [dataset], which one rank reads")
        collate = settings.pop("collate_fn", None) or default_collate
        common: dict[str, Any] = {
            "num_workers": num_workers,
            "seed": seed,
            "collate": collate,
            "settings": {**settings, "collate_fn": _as_it_is},
        }
        self._kind = f"stream with global_batch={global_batch}, seed={seed}"
        self._source: SharedStreams | WholeStream
        if is_shared:
            self._kind += f", {len(dataset)} shards, shuffle={shuffle}"
            self._source = SharedStreams(dataset, global_batch, shuffle=shuffle, **common)
        else:
            self._source = WholeStream(dataset, global_batch, **common)

    def batch(self, step: Step) -> Any:
        """Returns this rank's samples of the step, collated. A rank without a sample gets one, of weight 0.

        Call this once in each attempt at a step, inside its block, before `optimizer.step()`: with shards it may
        communicate.

        Raises:
            StepOrderError: the step is over, or already has a batch.
            UnsupportedOp: the training state lacks this loader, or has a sampler too; or the stream is empty.
            DataWorkerLost: the worker process has died.
            PacelineError: as for `Group.all_gather_object`.
            Exception: the dataset or its collation raised it. The worker process is then closed, and a new one starts
                if `batch` is called again.
        """
        return self._source.batch(step, of=self)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, which moves with each batch that `batch` returns."""
        return self._source.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes to a position. The next `batch` throws away what was fetched ahead.

        Raises:
            UnsupportedOp: it is of a loader with another number of shards, `shuffle` or `seed`.
        """
        self._source.load_state_dict(saved)

    def as_part(self) -> StatePart:
        """Returns the part of a training state (see `_elastic.parts.part_of`); refuses other settings or shards."""
        return opaque(self, self._kind)

    def close(self) -> None:
        """Ends the worker process. Idempotent; `batch` starts a new one."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_PROTOCOL = ("__iter__", "state_dict", "load_state_dict")


def _check(streams: Sequence[Any]) -> None:
    for stream in streams:
        if missing := [name for name in _PROTOCOL if not callable(getattr(stream, name, None))]:
            raise UnsupportedOp(
                f"{type(stream).__name__} has no {' and no '.join(missing)}: a stream must be able to save its "
                "position, so that it can resume there when workers come and go"
            )
    if not streams or len({id(stream) for stream in streams}) < len(streams):
        raise ValueError("want a list of streams, at least one, each of which is an object of its own")


def _as_it_is(fetched: Any) -> Any:
    """Returns its argument; takes the place of torch's collation, because the reader has collated already."""
    return fetched
