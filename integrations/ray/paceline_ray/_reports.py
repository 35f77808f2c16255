"""The reports of elastic workers to Ray Train: the metrics and the checkpoint of each step, once.

`ray.train.report` waits until all workers have called it, the dead ones and their replacements too. Here one member of
the view puts its report on a desk, an actor that outlives workers, and the controller takes it from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from paceline import Session, Step
from paceline.errors import StepOrderError

_log = logging.getLogger("paceline.ray")


@dataclass(frozen=True, slots=True)
class Report:
    """The metrics and the checkpoint (`ray.train.Checkpoint`, stored already) of a step."""

    step: int
    metrics: Mapping[str, Any]
    checkpoint: Any = None


class ReportDesk:
    """The reports that the controller has not taken yet; the class of an actor."""

    def __init__(self) -> None:
        self._last = 0
        self._waiting: list[Report] = []

    def wants(self, step: int) -> bool:
        """False if this step, or a later one, was reported before."""
        return step > self._last

    def put(self, report: Report) -> None:
        """Takes the first report of each step, in order."""
        if self.wants(report.step):
            self._last = report.step
            self._waiting.append(report)

    def take(self) -> list[Report]:
        """Hands over all reports that wait."""
        taken, self._waiting = self._waiting, []
        return taken


@dataclass(frozen=True, slots=True)
class Reporter:
    """A worker's way to the desk; `run` is a part of the names of checkpoints."""

    desk: Any
    run: str

    def deliver(self, step: int, metrics: Mapping[str, Any], save: Callable[[Path], None] | None) -> None:
        """Stores the checkpoint and reports the step, unless that was done before."""
        import ray  # here, so that those can import this package who do not use Ray Train
        import ray.train

        if not ray.get(self.desk.wants.remote(step)):
            _log.info("step %d was reported before, so this report of it is left out", step)
            return
        checkpoint = None
        if save is not None:
            with TemporaryDirectory() as folder:
                save(Path(folder))
                # The same name in each attempt: a worker that takes over overwrites a folder that is half written.
                storage = ray.train.get_context().get_storage()
                whole = ray.train.Checkpoint.from_directory(folder)
                checkpoint = storage.persist_current_checkpoint(whole, f"step_{step:08d}_{self.run}")
        ray.get(self.desk.put.remote(Report(step, metrics, checkpoint)))


_reporter: Reporter | None = None
"""This process's way to the desk."""
_last: Step | None = None
"""The step that was reported last."""


def use_reporter(reporter: Reporter) -> None:
    """Sets where this process reports."""
    global _reporter
    _reporter = reporter


def report(
    session: Session, step: Step, metrics: Mapping[str, Any], save: Callable[[Path], None] | None = None
) -> None:
    """Reports a step to Ray Train once, also if workers are lost meanwhile; use it in place of `ray.train.report`.

        for step in session.steps(state, total=1000):
            with step:
                ...
            if step.number % 100 == 0:
                paceline_ray.report(session, step, {"loss": loss}, lambda folder: torch.save(..., folder / "model.pt"))

    All workers call it alike, once behind the block of a step: decide by `step.number`, not by `step.applied`. The
    lowest rank that has applied the step reports, and the others wait for it; if that worker is lost before it has
    finished, the next one does it. A step that was undone is not reported, nor one that is trained again after a
    restart of all workers. No worker waits for Ray's controller, which takes the reports when it next polls the workers
    (`RAY_TRAIN_HEALTH_CHECK_INTERVAL_S`, 2 s).

    Args:
        session: the session whose loop this is.
        step: the step whose block has just ended.
        metrics: numbers and texts, no tensors; those of the worker that reports.
        save: writes the files of a checkpoint into the folder that it is given. Only the worker that reports calls it.
            Ray then copies the folder to the `storage_path` of its `RunConfig`.

    Raises:
        RuntimeError: this process is no worker of a `TorchTrainer` with a `PacelineConfig`.
        ValueError: `metrics` has tensors.
        StepOrderError: this step has a report already.
        PacelineError: a failure from which the loop cannot recover.
    """
    if _reporter is None:
        raise RuntimeError(
            "paceline_ray.report() needs a worker of ray.train.torch.TorchTrainer(torch_config=PacelineConfig(...))"
        )
    from ray.air._internal.torch_utils import contains_tensor

    if contains_tensor(dict(metrics)):
        raise ValueError("metrics has tensors, which Ray Train does not take: use tensor.item()")
    global _last
    if step is _last:
        raise StepOrderError(
            f"paceline_ray.report() was called twice behind step {step.number}: give all metrics to one call"
        )
    _last = step
    for attempt in session.retry():
        with attempt:
            lowest = session.group.all_reduce(np.array(session.rank if step.applied else session.size), op="min")
            if int(lowest) == session.rank:
                _reporter.deliver(step.number, metrics, save)
