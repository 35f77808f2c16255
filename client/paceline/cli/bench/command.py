"""`paceline bench`: starts the workers and shows what they measure."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console as RichConsole

from paceline.cli.bench.arithmetic import COLLECTIVES, Row, make_row, parse_sizes, size_text
from paceline.cli.bench.measure import measure
from paceline.cli.launcher import Worker, WorkerSettings
from paceline.cli.launcher.console import Console
from paceline.cli.output import UsageError, print_json
from paceline.cli.run import launch
from paceline.embedded import coordinator as embedded_coordinator
from paceline.group import Group

__all__ = ["run_bench"]

_LINKS = ("grpc", "local")


def run_bench(collective: str, workers: int, sizes: str, links: str, *, as_json: bool) -> int:
    """Measures a collective at each size over each link.

    Returns:
        The exit code.

    Raises:
        UsageError: something is asked for that cannot be measured.
    """
    if collective not in COLLECTIVES:
        raise UsageError(f"cannot measure {collective!r}: choose one of {', '.join(COLLECTIVES)}")
    wanted = [link.strip() for link in links.split(",")]
    for link in wanted:
        if link not in _LINKS:
            raise UsageError(f"there is no link {link!r}: this version measures {' and '.join(_LINKS)}")
    try:
        byte_counts = [0] if collective == "barrier" else parse_sizes(sizes)
    except ValueError as error:
        raise UsageError(str(error)) from None
    name = collective.replace("-", "_")
    view = _Rows(RichConsole(stderr=as_json))
    for link in wanted:
        run = _run_processes if link == "grpc" else _run_threads
        if code := run(name, workers, byte_counts, view):
            return code
    if as_json:
        print_json({"rows": view.rows})
    return 0


def _run_processes(collective: str, workers: int, sizes: list[int], view: _Rows) -> int:
    """One process per rank, gRPC streams over loopback between them."""
    command = ["-m", "paceline.cli.bench.worker", collective, *map(str, sizes)]
    listener = _BenchListener(view)
    try:
        with embedded_coordinator() as address:
            return launch(command, workers, WorkerSettings(address, "bench", workers, workers), listener)
    finally:
        listener.close()


def _run_threads(collective: str, workers: int, sizes: list[int], view: _Rows) -> int:
    """All ranks in this process: what the schedules cost without a network."""
    from paceline.testing import run_ranks

    for size in sizes:

        def rank(group: Group, size: int = size) -> list[float]:
            return measure(group, collective, size)

        times = run_ranks(workers, rank)[0]
        view.add(make_row(collective, "local", workers, size, times).as_dict())
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
            head = f"{'collective':<11}{'link':<6}{'W':>3}{'size':>10}{'median':>12}{'p10':>12}{'p99':>12}{'bus':>13}"
            self._console.print(head, style="bold", highlight=False)
        self.rows.append(values)
        self._console.print(
            f"{row.collective:<11}{row.link:<6}{row.world_size:>3}{size_text(row.bytes):>10}"
            f"{row.median_us:>9.1f} us{row.p10_us:>9.1f} us{row.p99_us:>9.1f} us{row.busbw_GBps:>8.3f} GB/s",
            highlight=False,
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
