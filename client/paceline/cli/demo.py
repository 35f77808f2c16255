"""`paceline demo`: trains on handwritten digits in real processes, kills and replaces a worker, and shows it all.

It starts the workers (`paceline.demo.training`), shows their state (`paceline.demo.progress`) live on a terminal or as
plain lines elsewhere, and checks the result.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from paceline.cli.access import Served, own_coordinator, say_where_the_page_is
from paceline.cli.launcher import Exit, Printed, Worker, WorkerSettings
from paceline.cli.launcher.notices import Notices
from paceline.cli.output import UsageError, print_json, say
from paceline.cli.run import launch
from paceline.demo.progress import DemoProgress, Stage, sparkline
from pacelinepb import install_command

GOOD_ACCURACY = 0.95
"""Least accuracy on the held-back fifth of the samples; a run below it has failed."""

_RESTARTS = 1
"""Most restarts of each worker: the demo kills one, and the user may kill another."""

_SETTLE_S = 10.0
"""Seconds to wait after the last join for workers that start slowly. A job may begin with fewer workers than its
maximum; the demo should not."""

_MICROBATCHES = 8
"""Least number of microbatches of a step with `--same-bits`."""

_STATE_STYLE = {
    "training": "green",
    "ready": "cyan",
    "joined": "cyan",
    "done": "bold green",
    "stopped": "yellow",
    "gave up": "yellow",
    "failed": "bold red",
    "killed": "bold red",
}

_LINE_EVERY_S = 1.0
"""Least seconds between two plain lines."""

_PICTURE_EVERY_S = 0.1
"""Least seconds between two pictures, because workers report every step."""


def run_demo(workers: int, *, kill_at_step: int, as_json: bool, http: bool = False, same_bits: bool = False) -> int:
    """Trains on the digits with workers on this machine, kills and replaces one of them, and shows the progress.

    `kill_at_step` is 0 for none. With `http` a page is served too, on a terminal until Enter or Ctrl-C. With
    `same_bits` it trains in microbatches, then once more on one worker without a failure, and compares the digests.

    Returns the exit code of the first worker that failed, if any. Else 0 if the digits were learnt, every sample
    counted once, if a kill was requested, training continued and a new worker joined, and the digests are equal if they
    were compared; 1 otherwise.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError(f"the demo trains on the digits of scikit-learn: {install_command('demo')}")
    console = Console(stderr=as_json)  # JSON has standard output to itself
    if kill_at_step and workers == 1:
        console.print("no worker will be killed: with one worker, training could not go on")
        kill_at_step = 0
    # With a power of two most worlds send one array each.
    microbatches = max(_MICROBATCHES, 1 << (workers - 1).bit_length()) if same_bits else 0
    view: View = LiveView(console) if console.is_terminal else PlainView(console)
    listener = DemoListener(view)
    with ExitStack() as serving:
        served: Served | None = None
        if http:
            served = serving.enter_context(own_coordinator(settle_time=_SETTLE_S, http="127.0.0.1:0"))
            say_where_the_page_is(served)  # before the picture, which would break the URL into lines
        with view:
            view.update(listener.progress)
            if served is None:
                served = serving.enter_context(own_coordinator(settle_time=_SETTLE_S))
            listener.progress.expected = workers
            view.update(listener.progress)
            settings = WorkerSettings(served.address, "demo", max(1, workers - 1), workers, token=served.token)
            command = _command(workers, kill_at_step, microbatches)
            code = launch(command, workers, settings, listener, restarts=_RESTARTS)
        if code:
            return code
        if listener.progress.result is None:
            say("the workers ended without a result")
            return 1
        result = as_result(listener.progress)
        wrong = faults(result, kill=kill_at_step > 0)
        _summary(console, listener.progress, result)
        if same_bits:
            result["digests"] = [
                listener.progress.result.get("digest", ""),
                _digest_alone(console, kill_at_step, microbatches),
            ]
            wrong += _compared(console, result)
        _list(console, wrong)
        if as_json:
            print_json(result)
        elif http and sys.stdin.isatty() and sys.stdout.isatty():
            _serve_on()
        return 1 if wrong else 0


def _command(workers: int, kill_at_step: int, microbatches: int) -> list[str]:
    """Returns the command line of a worker; with one worker, the step in which one is killed only adds steps."""
    return ["-m", "paceline.demo.training", str(workers), str(kill_at_step), str(microbatches)]


def _digest_alone(console: Console, kill_at_step: int, microbatches: int) -> str:
    """Trains once more, with one worker that nobody kills; returns the digest of its state, empty if it failed."""
    view = QuietView(console)
    view.note("the same run on one worker, without a failure")
    listener = DemoListener(view)
    with own_coordinator(settle_time=_SETTLE_S) as served:
        settings = WorkerSettings(served.address, "demo", 1, 1, token=served.token)
        launch(_command(1, kill_at_step, microbatches), 1, settings, listener, restarts=0)
    return "" if listener.progress.result is None else str(listener.progress.result.get("digest", ""))


def _compared(console: Console, result: dict[str, Any]) -> list[str]:
    """Shows the digests of both runs; returns what is wrong with them."""
    many, alone = result["digests"]
    causes = [recovery["cause"] for recovery in result["recoveries"]]
    story = ", ".join(f"{causes.count(cause)} {cause}" for cause in ("killed", "joined") if cause in causes)
    for digest, run in ((many, f"{result['world_size']} workers{f' ({story})' if story else ''}"), (alone, "1 worker")):
        console.print(f"{digest or 'no digest'}  {run}", highlight=False, soft_wrap=True)
    if many and many == alone:
        console.print("SHA-256 of weights, momentum and position: the same bits", style="bold green", highlight=False)
        return []
    return ["the digests differ: one worker does not compute the same bits"]


def _list(console: Console, wrong: list[str]) -> None:
    for text in wrong:
        console.print(f"[red]{text}[/]", highlight=False, soft_wrap=True)


def _serve_on() -> None:
    """Waits for Enter or Ctrl-C, so that the page can be looked at after the run."""
    say("the page is served until you press Enter or Ctrl-C")
    with suppress(KeyboardInterrupt):
        sys.stdin.readline()


def as_result(progress: DemoProgress) -> dict[str, Any]:
    """Returns the result as `--json` prints it."""
    assert progress.result is not None
    return {
        "accuracy": round(progress.result["accuracy"], 4),
        "steps": progress.result["steps"],
        "world_size": progress.result["world_size"],
        "generations": progress.ledger.generations,
        "recoveries": [recovery.as_dict() for recovery in progress.recoveries.found],
        "samples_once": progress.samples_once,
        "seconds": round(progress.result["seconds"], 3),
    }


def faults(result: dict[str, Any], *, kill: bool) -> list[str]:
    """Says what went wrong; empty if the demo has shown what it promises."""
    found = []
    if not result["samples_once"]:
        found.append("a sample was not used exactly once in every epoch")
    if result["accuracy"] < GOOD_ACCURACY:
        found.append(f"the accuracy is below {GOOD_ACCURACY:.0%}: training failed")
    causes = {recovery["cause"] for recovery in result["recoveries"]}
    if kill and "killed" not in causes:
        found.append("the others did not go on after a worker was killed")
    if kill and "joined" not in causes:
        found.append("training ended before a new worker had joined")
    return found


def _summary(console: Console, progress: DemoProgress, result: dict[str, Any]) -> None:
    good = result["accuracy"] >= GOOD_ACCURACY
    console.print(
        f"[bold {'green' if good else 'red'}]{result['accuracy']:.2%}[/] of the held-back fifth recognised "
        f"after {result['steps']} steps on {result['world_size']} worker{'s'[: result['world_size'] != 1]}",
        highlight=False,
        soft_wrap=True,
    )
    if result["samples_once"]:
        spite = ", though a worker was killed" if result["recoveries"] else ""
        console.print(
            f"every sample was used exactly once in each of {progress.epochs} epochs{spite}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"{result['steps'] / result['seconds']:.0f} steps per second, {decimal(progress.bytes_sent)} moved between "
        f"workers, {result['seconds']:.1f} s",
        highlight=False,
        soft_wrap=True,
    )


class View(Protocol):
    """Shows progress; a context manager."""

    def __enter__(self) -> View: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, progress: DemoProgress) -> None:
        """Shows a changed state."""

    def note(self, text: str) -> None:
        """Prints a line that stays on the screen."""


class DemoListener:
    """Updates the state from what workers report to the launcher, and shows it (a `LaunchListener`)."""

    def __init__(self, view: View) -> None:
        self.progress = DemoProgress()
        self._view = view
        self._notices = Notices()

    def line(self, worker: Worker, stream: str, printed: Printed) -> None:
        """Shows what a worker prints, most likely an error."""
        if printed.ended:
            self._view.note(f"[{worker.label}] {printed.text.decode(errors='replace')}")

    def record(self, worker: Worker, record: dict[str, Any]) -> None:
        """Updates the state from a worker's report."""
        if (notice := self._notices.read(worker.pid, record)) is not None:
            self._view.note(f"paceline: {notice}")
        for text in self.progress.told(worker.index, worker.pid, record):
            self._view.note(text)
        self._view.update(self.progress)

    def ended(self, worker: Worker, end: Exit, expected: bool) -> None:
        """Records and shows that a worker ended."""
        for text in self.progress.ended(worker.index, end.pid, end.returncode, follows=end.follows):
            self._view.note(text)
        if not expected:
            self._view.note(f"paceline: {end}")
        self._view.update(self.progress)

    def say(self, text: str) -> None:
        """Shows a message of the launcher."""
        self._view.note(f"paceline: {text}")


class QuietView:
    """Prints nothing but notes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> QuietView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, progress: DemoProgress) -> None:
        """Prints nothing."""

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(Text(text), soft_wrap=True)


class LiveView:
    """Redraws the state in place on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=10)
        self._latest: DemoProgress | None = None
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

    def update(self, progress: DemoProgress) -> None:
        """Draws the state if the last picture is old enough, or nothing trains yet: then there is little news."""
        self._latest, now = progress, time.monotonic()
        if now >= self._next or progress.stage is not Stage.TRAINS:
            self._next = now + _PICTURE_EVERY_S
            self._live.update(picture(progress, self._console))

    def note(self, text: str) -> None:
        """Prints a line above the picture."""
        self._live.console.print(Text(text))


class PlainView:
    """Prints a line after some of the epochs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._epochs = 0
        self._next = 0.0
        self._stage = Stage.TRAINS

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, progress: DemoProgress) -> None:
        """Prints a line if an epoch has ended and the last line is old enough, or it was the last epoch.

        Before the first epoch it prints what is waited for.
        """
        if progress.stage is not self._stage:
            self._stage = progress.stage
            if text := progress.waits_for:
                self.note(text)
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


def picture(progress: DemoProgress, console: Console) -> RenderableType:
    """Draws the whole state as a framed picture."""
    unicode = console.encoding.startswith("utf")
    if text := progress.waits_for:
        waits = Spinner("dots" if unicode else "line", Text(f" {text}"), style="cyan")
        return Panel(
            Group(waits, *([_workers(progress)] if progress.rows else [])),
            title="paceline demo",
            border_style="cyan",
            width=78,
        )
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


def _workers(progress: DemoProgress) -> Table:
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
