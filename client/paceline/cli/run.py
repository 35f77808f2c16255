"""`paceline run`: checks what was asked, finds or embeds a coordinator, and launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.cli.address import endpoint
from paceline.cli.credentials import worker_credentials
from paceline.cli.embedded import embedded_coordinator
from paceline.cli.launcher import Launcher, Listener, Terms, WorkerSettings, worker_bounds
from paceline.cli.launcher.console import Console, LogFiles
from paceline.cli.launcher.reports import ExitReports
from paceline.cli.output import UsageError
from paceline.config import Config

__all__ = ["launch", "run_workers"]

_GRACE_S = 5.0
"""On top of `failure_timeout`: what a failed worker's peers need at most to see it, raise, and end."""


def run_workers(
    command: Sequence[str],
    *,
    workers: int,
    coordinator: str | None,
    job: str,
    minimum: int | None,
    maximum: int | None,
    restarts: int,
    log_dir: Path | None,
    advertise: str | None = None,
    bind: bool = True,
) -> int:
    """Runs workers with their lines on the terminal.

    Returns:
        The exit code, by the rule of `launcher.supervision.Supervision`.

    Raises:
        UsageError: the arguments cannot be.
    """
    if command[0] != "-m" and not Path(command[0]).exists():  # found here once, rather than in every worker
        raise UsageError(f"there is no script {command[0]}")
    try:
        low, high = worker_bounds(workers, minimum, maximum)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if restarts < 0:
        raise UsageError(f"--restarts must be 0 or more, not {restarts}")
    if coordinator is None and low > workers:
        raise UsageError(
            f"--min {low} with -n {workers} waits for workers of other launchers: "
            "give all of them one coordinator (--coordinator)"
        )
    if advertise is not None and workers > 1 and endpoint(advertise, default_port=0).port:
        raise UsageError(f"--advertise {advertise} names one port for {workers} workers: leave it out")
    logs = None if log_dir is None else LogFiles(log_dir)
    with _coordinator(coordinator) as address, contextlib.closing(Console(logs)) as console:
        settings = WorkerSettings(address, job, low, high, advertise)
        return launch(command, workers, settings, console, restarts=restarts, alone=coordinator is None, bind=bind)


def launch(
    command: Sequence[str],
    workers: int,
    settings: WorkerSettings,
    listener: Listener,
    *,
    restarts: int = 0,
    alone: bool = True,
    bind: bool = True,
) -> int:
    """Runs workers and tells their coordinator how they end; returns the exit code.

    Args:
        command: SCRIPT ARGS... or -m MODULE ARGS...
        workers: how many.
        settings: what they are told of the job; it is elastic if it may have fewer workers than it may have at most.
        listener: shows what happens.
        restarts: how often each worker is started again at most; with any, the job is elastic too.
        alone: no other launcher brings workers for this job.
        bind: each worker gets its share of the cores, where there is one for each (`launcher.cores`).

    Raises:
        UsageError: a PACELINE_* variable does not hold what it should.
    """
    try:
        grace = Config.from_environment().failure_timeout + _GRACE_S
    except ValueError as error:
        raise UsageError(str(error)) from None
    terms = Terms(
        workers=workers,
        minimum=settings.min_workers,
        elastic=settings.min_workers < settings.max_workers or restarts > 0,
        alone=alone,
        restarts=restarts,
    )
    with ExitReports(settings.coordinator, settings.job, worker_credentials()) as reports:
        return Launcher(command, terms, settings, listener, grace=grace, report_exit=reports.report, bind=bind).run()


@contextlib.contextmanager
def _coordinator(address: str | None) -> Iterator[str]:
    if address is not None:
        yield str(endpoint(address))
    else:
        with embedded_coordinator() as own:
            yield own
