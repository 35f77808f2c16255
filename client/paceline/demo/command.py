"""`paceline demo`: starts it all, and judges the result."""

from __future__ import annotations

import importlib.util
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from paceline.cli.launcher import WorkerSettings
from paceline.cli.output import UsageError, print_json, say
from paceline.cli.run import launch
from paceline.demo.progress import Progress
from paceline.demo.view import DemoListener, LiveView, PlainView, View
from paceline.embedded import coordinator as embedded_coordinator

__all__ = ["GOOD_ACCURACY", "as_result", "run_demo"]

GOOD_ACCURACY = 0.95
"""On the held-back fifth; a run below it has gone wrong somewhere."""


def run_demo(workers: int, *, as_json: bool) -> int:
    """Trains the digits on some workers of this machine and shows how it goes.

    Returns:
        0 if the digits were learnt and every sample was used once; 1 otherwise; that of the first worker that failed.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError("the demo trains on the digits of scikit-learn: pip install 'paceline[demo]'")
    console = Console(stderr=as_json)  # standard output is the result's alone then
    view: View = LiveView(console) if console.is_terminal else PlainView(console)
    listener = DemoListener(view)
    with embedded_coordinator() as address, view:
        settings = WorkerSettings(address, "demo", workers, workers)
        code = launch(["-m", "paceline.demo.worker"], workers, settings, listener)
    if code:
        return code
    if listener.progress.result is None:
        say("the workers ended without a result")
        return 1
    result = as_result(listener.progress)
    _summary(console, listener.progress, result)
    if as_json:
        print_json(result)
    return 0 if result["accuracy"] >= GOOD_ACCURACY and result["samples_once"] else 1


def as_result(progress: Progress) -> dict[str, Any]:
    """The result in the form that `--json` gives it."""
    assert progress.result is not None
    return {
        "accuracy": round(progress.result["accuracy"], 4),
        "steps": progress.result["steps"],
        "world_size": progress.result["world_size"],
        "generations": len(progress.generations),
        "recoveries": [],
        "samples_once": progress.result["samples_once"],
        "seconds": round(progress.result["seconds"], 3),
    }


def _summary(console: Console, progress: Progress, result: dict[str, Any]) -> None:
    good = result["accuracy"] >= GOOD_ACCURACY
    console.print(
        f"[bold {'green' if good else 'red'}]{result['accuracy']:.2%}[/] of the held-back fifth recognised "
        f"after {result['steps']} steps on {result['world_size']} worker{'s'[: result['world_size'] != 1]}",
        highlight=False,
    )
    console.print(
        f"{result['steps'] / result['seconds']:.0f} steps per second, {decimal(progress.bytes_sent)} moved between "
        f"workers, {result['seconds']:.1f} s",
        highlight=False,
    )
    if not result["samples_once"]:
        console.print("[red]some sample was not used exactly once in every epoch[/]")
    if not good:
        console.print(f"[red]that is below {GOOD_ACCURACY:.0%}: something has gone wrong[/]")
