"""`paceline run`: checks what was asked, finds or embeds a coordinator, and launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.cli.address import endpoint
from paceline.cli.launcher import Launcher, Listener, WorkerSettings, worker_bounds
from paceline.cli.launcher.console import Console, LogFiles
from paceline.cli.launcher.reports import ExitReports
from paceline.cli.output import UsageError
from paceline.config import Config
from paceline.embedded import coordinator as embedded_coordinator

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
    log_dir: Path | None,
) -> int:
    """Runs workers with their lines on the terminal.

    Returns:
        The exit code.

    Raises:
        UsageError: the arguments cannot be.
    """
    if command[0] != "-m" and not Path(command[0]).exists():  # found here once, rather than in every worker
        raise UsageError(f"there is no script {command[0]}")
    try:
        low, high = worker_bounds(workers, minimum, maximum)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if coordinator is None and low > workers:
        raise UsageError(
            f"--min {low} with -n {workers} waits for workers of other launchers: "
            "give all of them one coordinator (--coordinator)"
        )
    logs = None if log_dir is None else LogFiles(log_dir)
    with _coordinator(coordinator) as address, contextlib.closing(Console(logs)) as console:
        return launch(command, workers, WorkerSettings(address, job, low, high), console)


def launch(command: Sequence[str], workers: int, settings: WorkerSettings, listener: Listener) -> int:
    """Runs workers and tells their coordinator how they end; returns the exit code.

    Raises:
        UsageError: a PACELINE_* variable does not hold what it should.
    """
    try:
        grace = Config.from_environment().failure_timeout + _GRACE_S
    except ValueError as error:
        raise UsageError(str(error)) from None
    with ExitReports(settings.coordinator, settings.job) as reports:
        return Launcher(command, workers, settings, listener, grace=grace, report_exit=reports.report).run()


@contextlib.contextmanager
def _coordinator(address: str | None) -> Iterator[str]:
    if address is not None:
        yield str(endpoint(address))
    else:
        with embedded_coordinator() as own:
            yield own
