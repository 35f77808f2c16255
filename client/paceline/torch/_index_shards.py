"""Shards of a dataset that is read by index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset


def index_shards(dataset: Any, shards: int, *, files: Sequence[int] | None = None) -> list[IterableDataset[Any]]:
    """Returns parts of a dataset as streams for `ElasticStreamLoader`, each a range of indices.

        shards = paceline.torch.index_shards(dataset, 64, files=samples_in_each_file)
        loader = paceline.torch.ElasticStreamLoader(shards, global_batch=256, shuffle=1000)

    Args:
        dataset: it has `len(dataset)`, and `dataset[i]` returns sample i, the same on every rank. It must not share
            itself out by rank, or shuffle.
        shards: how many; of about the same size.
        files: the number of samples in each file, in order. Each file then belongs to one shard, so one rank reads it.

    Raises:
        ValueError: `shards` is not between 1 and the number of files, or of samples; or `files` are not all of them.
    """
    total, count = len(dataset), len(dataset) if files is None else len(files)
    if (files is not None and sum(files) != total) or not 1 <= shards <= count:
        raise ValueError(
            f"want 1 to {count} shards, not {shards}"
            if files is None
            else f"want 1 to {count} shards, and files of {total} samples in all, not {shards} and {sum(files)}"
        )
    ends = np.arange(1, shards) * total // shards
    if files is not None:
        # Each boundary is the end of the file in which the even one lies, and each shard has a file.
        of_files = np.cumsum(files, dtype=np.int64)
        numbers = np.searchsorted(of_files, ends)
        for i in range(shards - 1):
            least = numbers[i - 1] + 1 if i else 0
            numbers[i] = min(max(numbers[i], least), count - shards + i)
        ends = of_files[numbers]
    return [_IndexShard(dataset, begin, end) for begin, end in pairwise([0, *ends.tolist(), total])]


class _IndexShard(IterableDataset[Any]):  # type: ignore[misc]
    """A range of indices as a stream."""

    def __init__(self, dataset: Any, begin: int, end: int) -> None:
        self._dataset = dataset
        self._next, self._end = begin, end

    def __iter__(self) -> Iterator[Any]:
        while self._next < self._end:
            self._next += 1
            yield self._dataset[self._next - 1]

    def state_dict(self) -> dict[str, int]:
        """Returns the position."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes to a position."""
        self._next = state["next"]
