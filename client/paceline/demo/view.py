"""The state of the run as something to look at: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.cli.launcher import Exit, Worker
from paceline.demo.progress import Progress, sparkline

__all__ = ["DemoListener", "LiveView", "PlainView", "View", "picture"]

_STATE_STYLE = {
    "training": "green",
    "joined": "cyan",
    "done": "bold green",
    "stopped": "yellow",
    "gave up": "yellow",
    "failed": "bold red",
    "killed": "bold red",
}

_LINE_EVERY_S = 1.0
"""Plain lines come at most this often."""

_PICTURE_EVERY_S = 0.1
"""So are pictures: workers tell of every step."""


class View(Protocol):
    """Shows progress. A context manager."""

    def __enter__(self) -> View: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, progress: Progress) -> None:
        """The state has changed."""

    def note(self, text: str) -> None:
        """Something to read that stays on the screen."""


class DemoListener:
    """Folds what the launcher hears into the state, and shows it (a `Listener`)."""

    def __init__(self, view: View) -> None:
        self.progress = Progress()
        self._view = view

    def line(self, worker: Worker, stream: str, line: bytes) -> None:
        """A worker that prints has something to say: an error, most likely."""
        self._view.note(f"[{worker.label}] {line.decode(errors='replace')}")

    def record(self, worker: Worker, record: dict[str, Any]) -> None:
        """A worker told of its progress."""
        for text in self.progress.told(worker.index, worker.pid, record):
            self._view.note(text)
        self._view.update(self.progress)

    def ended(self, worker: Worker, end: Exit, expected: bool) -> None:
        """A worker ended."""
        for text in self.progress.ended(worker.index, end):
            self._view.note(text)
        if not expected:
            self._view.note(f"paceline: {end}")
        self._view.update(self.progress)

    def say(self, text: str) -> None:
        """The launcher has something to say."""
        self._view.note(f"paceline: {text}")


class LiveView:
    """A picture that is drawn again in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=10)
        self._latest: Progress | None = None
        self._next = 0.0

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._latest is not None:
            self._live.update(picture(self._latest, self._console))
        self._live.__exit__(kind, error, trace)

    def update(self, progress: Progress) -> None:
        """Draws the state, if the last picture is old enough."""
        self._latest, now = progress, time.monotonic()
        if now >= self._next:
            self._next = now + _PICTURE_EVERY_S
            self._live.update(picture(progress, self._console))

    def note(self, text: str) -> None:
        """Prints above the picture."""
        self._live.console.print(Text(text))


class PlainView:
    """A line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._epochs = 0
        self._next = 0.0

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, progress: Progress) -> None:
        """Prints a line if an epoch has ended and the last line is old enough, or it was the last epoch."""
        now = time.monotonic()
        epochs = len(progress.losses)
        if epochs == self._epochs or progress.accuracy is None or (now < self._next and epochs < progress.epochs):
            return
        self._epochs, self._next = epochs, now + _LINE_EVERY_S
        rate = f"{progress.rate:.0f} steps/s  " if progress.rate else ""
        self.note(
            f"epoch {epochs:3}/{progress.epochs}  loss {progress.losses[-1]:.4f}  accuracy {progress.accuracy:.2%}  "
            f"{rate}sent {decimal(progress.bytes_sent)}"
        )

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(Text(text), soft_wrap=True)


def picture(progress: Progress, console: Console) -> RenderableType:
    """The whole state in a frame."""
    unicode = console.encoding.startswith("utf")
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(ratio=1)
    bar.add_column(justify="right", no_wrap=True)
    bar.add_row(
        ProgressBar(total=progress.total or 1, completed=progress.step, complete_style="cyan", finished_style="green"),
        f"step {progress.step}/{progress.total or '?'}",
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_row("loss", Text(sparkline(progress.losses, 40, unicode=unicode), style="yellow"), _last(progress.losses))
    accuracy = "" if progress.accuracy is None else f"{progress.accuracy:.2%} of the held-back fifth"
    facts.add_row("accuracy", Text(accuracy, style="bold green"))
    rate = f", {progress.rate:.0f} steps/s" if progress.rate else ""
    facts.add_row("moved", Text(f"{decimal(progress.bytes_sent)}{rate}"))
    return Panel(Group(bar, facts, _workers(progress)), title="paceline demo", border_style="cyan", width=78)


def _workers(progress: Progress) -> Table:
    table = Table("rank", "pid", "state", "samples", "steps/s", "sent", box=None, padding=(0, 2), header_style="dim")
    for column in table.columns[3:]:
        column.justify = "right"
    for row in sorted(progress.rows.values(), key=lambda row: (row.rank is None, row.rank, row.pid)):
        rank = "-" if row.rank is None else str(row.rank)
        state = Text(row.state, style=_STATE_STYLE.get(row.state, "dim"))
        table.add_row(
            rank,
            str(row.pid),
            state,
            f"{row.samples:,}",
            f"{row.rate:.0f}" if row.rate and row.state == "training" else "",
            decimal(row.bytes_sent),
        )
    return table


def _last(values: list[float]) -> str:
    return f"{values[-1]:.4f}" if values else ""
