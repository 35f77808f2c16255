"""Logged values and metrics are the same on all ranks: those of one process that has all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from paceline._group import Group
from paceline.errors import UnsupportedOp
from paceline.testing import run_ranks
from paceline_lightning._shared_values import Gains

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest]

ROWS = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1))
"""Guesses for three batches of 7 rows."""

Log = Callable[[Any, Any, Any, int], None]


def log_numbers(results: Any, metrics: Any, rows: Any, count: int) -> None:
    for name, asked in {
        "mean": {},
        "constant": {"batch_size": 5},
        "sum": {"reduce_fx": "sum", "value": rows.sum()},
        "top": {"reduce_fx": "max", "value": rows.max()},
        "least": {"reduce_fx": min, "value": rows.min()},
    }.items():
        told = {"value": rows.mean(), "batch_size": count, "on_step": True, **asked}
        results.log("training_step", name, **told)
    results.log("training_step", "on_step_only", rows.mean(), on_step=True, on_epoch=False)


def log_metrics(results: Any, metrics: Any, rows: Any, count: int) -> None:
    classes = (rows[:, 0] * 1000).long() % 4
    for metric in metrics:
        if isinstance(metric, MulticlassAccuracy | MulticlassF1Score):
            metric(rows, classes)
        else:
            metric(rows.amax(1))
        results.log("training_step", type(metric).__name__, metric, on_step=True, metric_attribute="of a module")


def all_metrics() -> list[Metric]:
    group = MetricCollection([MulticlassAccuracy(4, average="micro"), MulticlassF1Score(4)])
    return [*group.values(), MeanMetric(), SumMetric(), MaxMetric(), CatMetric()]


def logged(share_of: Callable[[int], tuple[int, int]], log: Log, group: Group | None = None) -> dict[str, Any]:
    """Logs three batches; returns what is logged in each, and at the end of the epoch."""
    results, metrics, told = _ResultCollection(training=True), all_metrics(), {}
    for number, rows in enumerate(ROWS):
        begin, end = share_of(len(rows))
        mine = rows[begin:end] if begin < end else rows[:1]
        gains = Gains(results, metrics)
        log(results, metrics, mine, len(mine))
        if group is not None:
            numbers, flag = gains.share(
                group,
                (end - begin) / len(rows),
                end - begin,
                [float(mine.mean())],
                flag=group.rank == number == 1,
                usual=5,
            )
            told[f"loss {number}"] = numbers[0]
            assert flag == (number == 1 and group.size > 1)
        else:
            told[f"loss {number}"] = float(rows.mean())
        told |= {f"{name} {number}": value for name, value in results.metrics(on_step=True)["log"].items()}
    return told | results.metrics(on_step=False)["log"]


def ordered(value: Any) -> list[float]:
    """Ranks put lists together rank by rank, and one process has them row by row."""
    return sorted(torch.as_tensor(value).flatten().tolist())


@pytest.mark.parametrize("log", [log_numbers, log_metrics])
@pytest.mark.parametrize("world", [2, 3, 9])
def test_values_are_those_of_one_process(world: int, log: Log) -> None:
    """With 9 ranks two have no row."""
    alone = logged(lambda count: (0, count), log)
    for told in run_ranks(
        world,
        lambda group: logged(
            lambda count: (group.rank * count // world, (group.rank + 1) * count // world), log, group
        ),
    ):
        assert told.keys() == alone.keys()
        for name, value in alone.items():
            if name.startswith("MaxMetric_step"):  # each rank has its own
                continue
            assert ordered(told[name]) == pytest.approx(ordered(value), rel=1e-5), name


def test_other_values_on_another_rank_are_refused() -> None:
    def rank(group: Group) -> str:
        results: Any = _ResultCollection(training=True)
        gains = Gains(results, [])
        results.log("training_step", f"loss_{group.rank}", torch.tensor(1.0), on_step=True, batch_size=2)
        with pytest.raises(UnsupportedOp, match="logged different values"):
            gains.share(group, 0.5, 2)
        return "refused"

    assert run_ranks(2, rank) == ["refused"] * 2


def test_a_state_without_a_way_to_add_it_up_is_refused() -> None:
    class Last(Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("last", torch.tensor(0.0), dist_reduce_fx=None)

        def update(self, value: torch.Tensor) -> None:
            self.last = value

        def compute(self) -> torch.Tensor:
            return self.last

    def rank(group: Group) -> str:
        metric = Last()
        gains = Gains(_ResultCollection(training=True), [metric])
        metric.update(torch.tensor(1.0))
        with pytest.raises(UnsupportedOp, match=r"Last.last cannot be put together"):
            gains.share(group, 0.5, 2)
        return "refused"

    assert run_ranks(2, rank) == ["refused"] * 2
