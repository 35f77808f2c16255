"""Rank 0 logs each line once and names each checkpoint, also if rank 0 dies or a step is undone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from paceline_lightning._later import Later, open_logger

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest]


class Logger:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.told.append((step, metrics))

    def save(self) -> None:
        """Has nothing to save."""


class Worker:
    """A worker with a logger; all note the same."""

    def __init__(self) -> None:
        self.logger = Logger()
        self.later = Later(os.remove)
        self._collecting = self.later.collecting([self.logger])
        self._collecting.__enter__()

    def begin(self, *, is_first: bool, rank_0_begins: bool = True) -> dict[str, Any]:
        """Begins a step; returns the state as it was before."""
        before = self.later.state_dict()
        self.later.begin_step()
        self.later.do(is_first)
        if rank_0_begins:
            self.later.rank_0_has_begun()
        return before


def test_logs_are_told_when_the_next_step_begins_by_rank_0_alone() -> None:
    first, second = Worker(), Worker()
    for step in range(3):
        first.begin(is_first=True)
        second.begin(is_first=False)
        for worker in (first, second):
            worker.logger.log_metrics({"loss": step}, step)
    assert first.logger.told == [(0, {"loss": 0}), (1, {"loss": 1})]
    assert second.logger.told == []


def test_the_next_rank_0_tells_what_the_last_one_has_not() -> None:
    second = Worker()
    second.begin(is_first=False)
    second.logger.log_metrics({"loss": 1.0}, 0)
    before = second.begin(is_first=False, rank_0_begins=False)  # rank 0 has died
    second.later.load_state_dict(before)
    second.begin(is_first=True)
    assert second.logger.told == [(0, {"loss": 1.0})]


def test_the_next_rank_0_does_not_tell_again_what_the_last_one_has() -> None:
    second = Worker()
    second.begin(is_first=False)
    second.logger.log_metrics({"loss": 1.0}, 0)
    before = second.begin(is_first=False)
    second.logger.log_metrics({"loss": 0.5}, 1)  # in an attempt that is undone: rank 0 has died
    second.later.load_state_dict(before)
    second.begin(is_first=True)
    assert second.logger.told == []
    second.logger.log_metrics({"loss": 0.5}, 1)
    second.begin(is_first=True)
    assert second.logger.told == [(1, {"loss": 0.5})]


def test_a_checkpoint_gets_its_name_when_the_next_step_begins(tmp_path: Path) -> None:
    worker, path, old = Worker(), str(tmp_path / "a.ckpt"), tmp_path / "old.ckpt"
    old.touch()
    undone = worker.begin(is_first=True)
    Path(worker.later.staged(path, "1-1")).write_text("undone")
    worker.later.load_state_dict(undone)
    worker.begin(is_first=True)
    Path(worker.later.staged(path, "1-2")).write_text("whole")
    worker.later.remove(str(old))
    assert not Path(path).exists()
    assert old.exists()
    worker.begin(is_first=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
    assert Path(path).read_text() == "whole"


@pytest.mark.filterwarnings("ignore:Experiment logs directory")  # Lightning says that it starts anew
def test_the_next_rank_0_has_begun_with_the_file_of_a_csv_logger(tmp_path: Path) -> None:
    for goes_on, expected in ((False, 2), (True, 3), (False, 2)):
        logger = CSVLogger(tmp_path, "run", version=3)
        open_logger(logger, goes_on=goes_on)
        logger.log_metrics({"loss": 1.0}, step=7)
        logger.save()
        assert len((tmp_path / "run" / "version_3" / "metrics.csv").read_text().split()) == expected
