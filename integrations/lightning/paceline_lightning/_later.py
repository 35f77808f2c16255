"""Work of rank 0 that waits until a step is committed: it tells loggers, and names and removes checkpoints.

A step may be undone until then, and another worker may have rank 0 when it is done again. So all workers note the same,
as a part of the training state, and the worker that has rank 0 in the next step does it.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor


class Later:
    """Entries of the present step; `count` is the number of all entries up to now."""

    def __init__(self, remove: Callable[[str], None]) -> None:
        self.count = 0
        self._remove = remove
        self._noted: list[list[Any]] = []
        self._due: list[list[Any]] = []
        """Entries of the step before."""
        self._done = self._seen = 0
        """How many entries are done, as far as this worker knows; and how many it knew when this step began."""
        self._loggers: Sequence[Any] = ()

    @contextlib.contextmanager
    def collecting(self, loggers: Sequence[Any]) -> Iterator[None]:
        """Inside the block, what loggers are told is noted."""
        self._loggers = loggers
        for number, logger in enumerate(loggers):
            logger.log_metrics = partial(self._note_log, number)
        try:
            yield
        finally:
            for logger in loggers:
                del logger.log_metrics

    def begin_step(self) -> None:
        """Makes the entries of the step before due; called inside the step, which may be undone."""
        self._due, self._noted, self._seen = self._noted, [], self.count

    def do(self, is_first: bool) -> None:
        """Does what is due, if this worker has rank 0; just before all take part in the first sum of the step.

        Rank 0 may have died before it, also if the others do not know it yet: then they do it when this step begins
        anew. So they count it as done only once rank 0 has taken part.
        """
        if is_first:
            first = self._seen - len(self._due)
            for entry in self._due[max(0, self._done - first) :]:
                self._do(*entry)
            self._done = self._seen

    def do_files(self) -> None:
        """Names and removes files, which may be done twice; called when this worker leaves."""
        for kind, *entry in self._noted:
            if kind != "log":
                self._do(kind, *entry, tidies=False)

    def publishes(self, path: str) -> bool:
        """Returns whether a file gets this name once the step is committed."""
        return any(entry[0] == "publish" and entry[2] == path for entry in self._noted)

    def rank_0_has_begun(self) -> None:
        """Notes that rank 0 has taken part in the present step, so all entries before are done."""
        self._done = max(self._done, self._seen)

    def staged(self, path: str, attempt: str) -> str:
        """Returns the path at which a file is written that gets the name `path` later."""
        staged = f"{path}.{attempt}.part"
        self._note("publish", staged, path)
        return staged

    def remove(self, path: str) -> None:
        """Removes a file later."""
        self._note("remove", path)

    def state_dict(self) -> dict[str, Any]:
        """Returns the entries."""
        return {"count": self.count, "noted": [list(entry) for entry in self._noted]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Puts the entries back."""
        self.count, self._noted = saved["count"], [list(entry) for entry in saved["noted"]]

    def _note(self, *entry: Any) -> None:
        self._noted.append(list(entry))
        self.count += 1

    def _note_log(self, number: int, metrics: Any, step: int | None = None) -> None:
        numbers = _plain(metrics)
        if numbers is None:  # images and the like cannot be a part of the training state
            type(self._loggers[number]).log_metrics(self._loggers[number], metrics, step)
        else:
            self._note("log", number, numbers, step)

    def _do(self, kind: str, *entry: Any, tidies: bool = True) -> None:
        if kind == "log":
            number, metrics, step = entry
            logger = self._loggers[number]
            type(logger).log_metrics(logger, metrics, step)
            logger.save()
        elif kind == "publish":
            staged, path = entry
            with contextlib.suppress(FileNotFoundError):  # rank 0 before this one has done it
                os.replace(staged, path)
            for left in glob.glob(f"{glob.escape(path)}.*.part*") if tidies else ():  # of attempts that were undone
                os.remove(left)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._remove(entry[0])


def open_logger(logger: Any, *, goes_on: bool) -> None:
    """Opens a logger in the process that has rank 0 now; `goes_on` if another one has logged before it."""
    written = b""
    if goes_on and isinstance(logger, CSVLogger):  # which removes what is there
        with contextlib.suppress(FileNotFoundError), open(os.path.join(logger.log_dir, "metrics.csv"), "rb") as file:
            written = file.read()
    with warnings.catch_warnings():
        if written:
            warnings.filterwarnings("ignore", "Experiment logs directory")  # it says that the file will be lost
        getattr(logger, "experiment", None)
    if written:
        writer = logger.experiment
        with open(writer.metrics_file_path, "wb") as file:
            file.write(written)
        writer.metrics_keys = next(csv.reader(written.decode().splitlines()))


def _plain(value: Any) -> Any:
    """Returns what is logged with numbers in place of tensors; None if it has anything else."""
    if isinstance(value, dict):
        plain = {key: _plain(each) for key, each in value.items()}
        return None if None in plain.values() else plain
    if isinstance(value, Tensor | np.generic):
        return value.item()
    return value if isinstance(value, int | float | str) else None
