"""Hugging Face's streams in shards: each file is read by one rank, and any rank reads it on."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import tqdm

from paceline._group import Group
from paceline.testing import run_ranks
from paceline.torch import ElasticStreamLoader

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest]

tqdm.tqdm.monitor_interval = 0  # otherwise it starts a thread

FILES, ROWS, BATCH = 6, 23, 8
STEPS = -(-FILES * ROWS // BATCH)
"""Steps of an epoch."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in range(FILES):
        lines = [json.dumps({"text": f"line {file * ROWS + row}"}) for row in range(ROWS)]
        (tmp_path / f"{file}.jsonl").write_text("\n".join(lines))
    return tmp_path


class Reading:
    """Some ranks that read one epoch after another.

    Attributes:
        steps: the samples of each step.
        reads: how often each sample was read.
    """

    def __init__(self, folder: Path) -> None:
        self.steps: list[list[int]] = []
        self.reads: Counter[int] = Counter()
        self._folder = folder
        self._state: Any = None

    def _loader(self, **settings: Any) -> ElasticStreamLoader:
        def number(row: dict[str, str]) -> dict[str, int]:
            found = int(row["text"].removeprefix("line "))
            self.reads[found] += 1
            return {"number": found}

        files = [str(self._folder / f"{file}.jsonl") for file in range(FILES)]
        cache = str(self._folder / "cache")
        stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=cache)
        numbered = stream.map(number, remove_columns=["text"])
        shards = [numbered.shard(num_shards=FILES, index=index) for index in range(FILES)]
        return ElasticStreamLoader(shards, BATCH, collate_fn=_numbers, **settings)

    def go_on(self, world: int, steps: int, **settings: Any) -> None:
        """Takes steps with so many ranks, with new loaders that go to where the ranks before them were."""
        loaders = [self._loader(**settings) for _ in range(world)]

        def rank(group: Group) -> tuple[list[list[int]], Any]:
            found = []
            with loaders[group.rank] as loader:
                if self._state is not None:
                    loader.load_state_dict(self._state)
                for _ in range(steps):
                    weights: list[float] = []
                    step: Any = SimpleNamespace(
                        generation=1,
                        rank=group.rank,
                        world=group.size,
                        _group=group,
                        count=lambda weight, of, to=weights: to.append(weight),
                        _check_source=lambda of: None,
                    )
                    numbers = loader.batch(step)
                    found.append(numbers if weights[0] else [])
                return found, loader.state_dict()

        ranks = run_ranks(world, rank)
        self.steps += [sorted(chain(*parts)) for parts in zip(*(found for found, _ in ranks), strict=True)]
        self._state = ranks[0][1]


def _numbers(rows: list[dict[str, int]]) -> list[int]:
    return [row["number"] for row in rows]


@pytest.mark.parametrize(("shuffle", "workers"), [(0, 0), (5, 0), (5, 1)])
def test_each_sample_counts_once_while_the_world_changes(shuffle: int, workers: int, folder: Path) -> None:
    alone, together = Reading(folder), Reading(folder)
    alone.go_on(1, 2 * STEPS, shuffle=shuffle)
    for world, steps in ((3, 4), (2, 3), (4, STEPS - 5), (1, 1), (3, STEPS - 3)):
        together.go_on(world, steps, shuffle=shuffle, num_workers=workers)
    assert together.steps == alone.steps
    for epoch in (alone.steps[:STEPS], alone.steps[STEPS:]):
        assert sorted(chain(*epoch)) == list(range(FILES * ROWS))
    in_turn = sorted(file * ROWS + row for row in range(2) for file in range(FILES))
    assert (set(alone.steps[0]) <= set(in_turn)) == (not shuffle)


def test_ranks_read_no_more_than_one_rank(folder: Path) -> None:
    for world in (1, 3):
        reading = Reading(folder)
        reading.go_on(world, STEPS)
        assert set(reading.reads.values()) == {1}
        assert len(reading.reads) == FILES * ROWS
