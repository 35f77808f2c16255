"""The workers gather the rows of a shared loader as one process has them, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline._group import Group
from paceline.errors import UnsupportedOp
from paceline.testing import run_ranks
from paceline_accelerate._together import Block, Together

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest]

WORLDS = [1, 2, 3, 9]
CPU = torch.device("cpu")


class Stream(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def gathered(world: int, loader: Any, of: Callable[[torch.Tensor], Any]) -> list[list[Any]]:
    """Returns the results that each rank gathers for the batches of a loader."""

    def rank(group: Group) -> list[Any]:
        together = Together(group, Block())
        return [together.gather(of(batch)) for batch in together.share(loader, CPU)]

    return run_ranks(world, rank)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_each_row_is_gathered_once_in_order(world: int, dtype: torch.dtype) -> None:
    """Batches of 7 and of 2 rows: with 9 workers some have none."""
    rows = torch.arange(23 * 3).reshape(23, 3).to(dtype)
    for found in gathered(world, DataLoader(rows, 7), lambda batch: {"all": batch, "first": batch[:, 0]}):
        assert [len(each["all"]) for each in found] == [7, 7, 7, 2]
        assert torch.cat([each["all"] for each in found]).equal(rows)
        assert torch.cat([each["first"] for each in found]).equal(rows[:, 0])


@pytest.mark.parametrize("world", WORLDS)
def test_objects_are_gathered_as_lists(world: int) -> None:
    for found in gathered(world, DataLoader(range(10), 4), lambda batch: [f"{number}" for number in batch.tolist()]):
        assert found == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]


def test_all_take_the_order_of_rank_0() -> None:
    for found in gathered(3, DataLoader(range(10), 4, shuffle=True), lambda batch: batch):
        assert sorted(torch.cat(found).tolist()) == list(range(10))


def test_sums_and_lengths_are_those_of_all_workers() -> None:
    def rank(group: Group) -> list[Any]:
        together = Together(group, Block())
        own = torch.full((1, group.rank + 1), group.rank, dtype=torch.bfloat16)
        return [
            together.reduce(torch.tensor([group.rank, 1])),
            together.reduce({"mean": torch.tensor(float(group.rank))}, reduction="mean", scale=2.0)["mean"],
            together.reduce(torch.tensor(1.0, dtype=torch.bfloat16)),
            together.reduce(torch.tensor([group.rank, -group.rank]), reduction="max"),
            together.reduce(own, reduction="none"),
            together.pad(own, dim=1, pad_index=7),
            together.pad(own, dim=1, pad_first=True),
            together.pad(own, dim=2),
        ]

    for number, found in enumerate(run_ranks(3, rank)):
        assert found[0].tolist() == [3, 3]
        assert (found[1].item(), found[2].item(), found[2].dtype) == (1.0, 3.0, torch.bfloat16)
        assert found[3].tolist() == [2, 0]
        own = [float(number)] * (number + 1)
        assert found[4].tolist() == found[7].tolist() == [own]
        assert found[5].tolist() == [own + [7.0] * (2 - number)]
        assert found[6].tolist() == [[0.0] * (2 - number) + own]


def test_rows_that_are_not_those_of_the_batch_are_refused() -> None:
    def rank(group: Group) -> None:
        together = Together(group, Block())
        with pytest.raises(UnsupportedOp, match=r"gather in steps.retry\(\) needs a batch"):
            together.gather(torch.ones(2))
        with pytest.raises(UnsupportedOp, match="Stream cannot be shared out by rows"):
            next(together.share(DataLoader(Stream(), 2), CPU))
        for _ in together.share(DataLoader(range(4), 2), CPU):
            for odd in (torch.tensor(1.0), torch.ones(3), ["a", "b", "c"]):
                with pytest.raises(UnsupportedOp, match="one row for each row of the batch"):
                    together.gather(odd)

    run_ranks(1, rank)


def finish(made: Sequence[bool], attempts: int = 1) -> list[list[Any]]:
    """Returns the calls of each rank, if each logs its rank, and these have made the step."""

    def rank(group: Group) -> list[Any]:
        block, told = Block(), []
        for _ in range(attempts):
            together = Together(group, block)
            log = {"loss": torch.tensor(group.rank)}
            together.note(lambda values, step: told.append((values["loss"], step)), [log], {"step": 4}, is_log=True)
            together.note(lambda: told.append("save"), [], {}, is_log=False)
            together.finish(has_applied=made[group.rank], again=False)
        return told

    return run_ranks(len(made), rank)


def test_rank_0_logs_and_saves() -> None:
    assert finish([True, True, True]) == [[(0, 4), "save"], [], []]


def test_a_rank_0_that_has_not_made_the_step_logs_the_values_of_one_that_has() -> None:
    assert finish([False, False, True]) == [[(2, 4), "save"], [], []]


def test_nothing_is_logged_or_saved_of_a_step_that_is_undone() -> None:
    assert finish([False, False]) == [[], []]


def test_an_attempt_that_others_repeat_does_not_log_again() -> None:
    assert finish([True, True], attempts=2) == [[(0, 4), "save"], []]


def test_numbers_of_checkpoints_follow_those_that_are_there(tmp_path: Path) -> None:
    """A worker that came later has counted none. An attempt that was interrupted is made again with its numbers."""
    for name in ("checkpoint_0", "checkpoint_11", "notes"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)

    def rank(group: Group) -> list[Any]:
        project = SimpleNamespace(project_dir=str(tmp_path), iteration=12 if group.rank else 0)
        block, saved = Block(), []

        def save() -> None:
            folder = tmp_path / "checkpoints" / f"checkpoint_{project.iteration}"
            folder.mkdir()
            (folder / "model").touch()
            saved.append(project.iteration)

        for again in (False, True):
            together = Together(group, block)
            for _ in range(2):
                together.save_numbered(project, save)
            together.finish(has_applied=True, again=again)
            if not again:
                block.done = False  # as if the rank 0 of the first attempt were gone
        return saved

    assert run_ranks(2, rank) == [[12, 13, 12, 13], []]


def test_a_number_that_only_one_worker_has_learned_holds_for_all(tmp_path: Path) -> None:
    """A loss interrupted the attempt in which the workers agreed on it."""

    def rank(group: Group) -> int | None:
        block = Block(number=5 if group.rank else None)
        Together(group, block).save_numbered(SimpleNamespace(project_dir=str(tmp_path), iteration=0), print)
        return block.number

    assert run_ranks(2, rank) == [5, 5]
