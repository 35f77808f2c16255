"""`paceline bench`: starts the workers and shows what they measure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console as RichConsole

from paceline.cli.bench.arithmetic import Row, make_row
from paceline.cli.bench.measure import measure
from paceline.cli.bench.plan import Job, plan
from paceline.cli.bench.sizes import size_text
from paceline.cli.embedded import embedded_coordinator
from paceline.cli.launcher import Worker, WorkerSettings
from paceline.cli.launcher.console import Console
from paceline.cli.output import UsageError, print_json
from paceline.cli.run import launch
from paceline.testing import run_ranks

__all__ = ["run_bench"]

_LINKS = ("grpc", "local")

_LOCAL_TIMEOUT_S = 3600.0
"""For one job between threads; a machine that needs longer for it has no memory left for its arrays."""


def run_bench(
    collective: str, workers: int, sizes: str, links: str, schedule: str | None = None, *, as_json: bool
) -> int:
    """Measures a collective, or all of them, at each size over each link.

    Args:
        collective: as the command line spells it.
        workers: world size.
        sizes: with commas, see `parse_sizes`.
        links: with commas.
        schedule: names with commas, measured turn about, and then named in the rows; None for what is chosen.
        as_json: the rows are standard output's last line.

    Returns:
        The exit code.

    Raises:
        UsageError: something is asked for that cannot be measured.
    """
    wanted = [link.strip() for link in links.split(",")]
    for link in wanted:
        if link not in _LINKS:
            raise UsageError(f"there is no link {link!r}: this version measures {' and '.join(_LINKS)}")
    try:
        jobs = plan(collective, workers, sizes, schedule)
    except ValueError as error:
        raise UsageError(str(error)) from None
    view = _Rows(RichConsole(stderr=as_json))
    for link in wanted:
        run = _run_processes if link == "grpc" else _run_threads
        if code := run(jobs, workers, view):
            return code
    if as_json:
        # Rows have the keys that scripts rely on, and one more only where it is needed to tell rows apart.
        rows = [{key: row[key] for key in row if schedule or key != "schedule"} for row in view.rows]
        print_json({"rows": rows})
    return 0


def _run_processes(jobs: Sequence[Job], workers: int, view: _Rows) -> int:
    """One process per rank, gRPC streams over loopback between them."""
    command = ["-m", "paceline.cli.bench.worker", *(job.to_argument() for job in jobs)]
    listener = _BenchListener(view)
    try:
        with embedded_coordinator() as address:
            return launch(command, workers, WorkerSettings(address, "bench", workers, workers), listener)
    finally:
        listener.close()


def _run_threads(jobs: Sequence[Job], workers: int, view: _Rows) -> int:
    """All ranks in this process: what the schedules cost without a network."""
    for job in jobs:
        for schedule, times in run_ranks(workers, partial(measure, job=job), timeout=_LOCAL_TIMEOUT_S)[0]:
            view.add(make_row(job.collective, schedule, "local", workers, job.bytes, times).as_dict())
    return 0


class _Rows:
    """Rows as they come in, each shown at once."""

    def __init__(self, console: RichConsole) -> None:
        self.rows: list[dict[str, Any]] = []
        self._console = console

    def add(self, values: dict[str, Any]) -> None:
        """Takes a row in the form of `Row.as_dict` and shows it."""
        row = Row(**values)
        if not self.rows:
            head = f"{'collective':<15}{'schedule':<19}{'link':<6}{'W':>2}{'size':>10}"
            head += f"{'median us':>11}{'p10 us':>10}{'p99 us':>11}{'bus GB/s':>10}"
            self._console.print(head, style="bold", highlight=False, soft_wrap=True)
        self.rows.append(values)
        self._console.print(
            f"{row.collective:<15}{row.schedule or '-':<19}{row.link:<6}{row.world_size:>2}{size_text(row.bytes):>10}"
            f"{row.median_us:>11.1f}{row.p10_us:>10.1f}{row.p99_us:>11.1f}{row.busbw_GBps:>10.3f}",
            highlight=False,
            soft_wrap=True,
        )


class _BenchListener(Console):
    """Rows to the view; whatever else a worker has to say goes to standard error."""

    def __init__(self, view: _Rows) -> None:
        super().__init__(out=sys.stderr)
        self._view = view

    def record(self, worker: Worker, record: dict[str, Any]) -> None:
        """Shows a row."""
        if record.pop("kind", None) == "bench":
            self._view.add(record)
