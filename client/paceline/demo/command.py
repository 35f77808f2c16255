"""`paceline demo`: starts it all, and judges the result."""

from __future__ import annotations

import importlib.util
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from paceline.cli.embedded import own_coordinator
from paceline.cli.launcher import WorkerSettings
from paceline.cli.output import UsageError, print_json, say
from paceline.cli.run import launch
from paceline.demo.progress import Progress
from paceline.demo.view import DemoListener, LiveView, PlainView, View

__all__ = ["GOOD_ACCURACY", "as_result", "faults", "run_demo"]

GOOD_ACCURACY = 0.95
"""On the held-back fifth; a run below it has gone wrong somewhere."""

_RESTARTS = 1
"""Of each worker: the demo kills one, and whoever watches may kill another."""


_SETTLE_S = 10.0
"""After the last arrival: how long to wait for workers that are slow to start before the others begin. A job may begin
with fewer than it may have at most; the demo should not."""


def run_demo(workers: int, *, kill_at_step: int, as_json: bool) -> int:
    """Trains the digits on some workers of this machine, kills and replaces one of them, and shows how it goes.

    Args:
        workers: how many.
        kill_at_step: the step in which one is killed, 0 for none.
        as_json: the last line of standard output is the result.

    Returns:
        0 if the digits were learnt, every sample counted once, and the job came through the kill and went on with a new
        worker, if one was asked for; 1 otherwise; that of the first worker that failed.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError("the demo trains on the digits of scikit-learn: pip install 'paceline[demo]'")
    console = Console(stderr=as_json)  # standard output is the result's alone then
    if kill_at_step and workers == 1:
        console.print("nobody will be killed: a single worker would leave nobody to go on")
        kill_at_step = 0
    view: View = LiveView(console) if console.is_terminal else PlainView(console)
    listener = DemoListener(view)
    with own_coordinator(settle_time=_SETTLE_S) as served, view:
        settings = WorkerSettings(served.address, "demo", max(1, workers - 1), workers, token=served.token)
        command = ["-m", "paceline.demo.worker", str(workers), str(kill_at_step)]
        code = launch(command, workers, settings, listener, restarts=_RESTARTS)
    if code:
        return code
    if listener.progress.result is None:
        say("the workers ended without a result")
        return 1
    result = as_result(listener.progress)
    wrong = faults(result, kill=kill_at_step > 0)
    _summary(console, listener.progress, result, wrong)
    if as_json:
        print_json(result)
    return 1 if wrong else 0


def as_result(progress: Progress) -> dict[str, Any]:
    """The result in the form that `--json` gives it."""
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
    """What is not as it should be, in words; nothing if the demo has shown what it promises."""
    found = []
    if not result["samples_once"]:
        found.append("some sample did not count exactly once in every epoch")
    if result["accuracy"] < GOOD_ACCURACY:
        found.append(f"the accuracy is below {GOOD_ACCURACY:.0%}: something has gone wrong")
    causes = {recovery["cause"] for recovery in result["recoveries"]}
    if kill and "killed" not in causes:
        found.append("no worker was killed that the others went on without")
    if kill and "joined" not in causes:
        found.append("the training was over before a new worker had come in")
    return found


def _summary(console: Console, progress: Progress, result: dict[str, Any], wrong: list[str]) -> None:
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
            f"every sample counted exactly once in each of {progress.epochs} epochs{spite}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"{result['steps'] / result['seconds']:.0f} steps per second, {decimal(progress.bytes_sent)} moved between "
        f"workers, {result['seconds']:.1f} s",
        highlight=False,
        soft_wrap=True,
    )
    for text in wrong:
        console.print(f"[red]{text}[/]", highlight=False, soft_wrap=True)
