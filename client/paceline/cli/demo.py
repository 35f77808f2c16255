"""`paceline demo`: trains on handwritten digits in real processes, kills and replaces a worker, and checks the ledger.

The workers run `paceline.demo.train`, and their lines are shown as `paceline run` shows them.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from paceline._base.terminal import UsageError, say
from paceline.cli.access import endpoint, keep_the_page, say_where_the_page_is
from paceline.cli.launcher import WorkerSettings
from paceline.cli.launcher.console import Console
from paceline.cli.output import print_json
from paceline.cli.run import launch
from paceline.demo.ledger import Ledger
from paceline.launch._own_coordinator import Served, own_coordinator
from pacelinepb import install_command

GOOD_ACCURACY = 0.95
"""Least accuracy on the held-back fifth of the samples; a run below it has failed."""

_RESTARTS = 1
"""Most restarts of each worker: the demo kills one, and the user may kill another."""

_MICROBATCHES = 8
"""Least number of microbatches of a step with `--same-bits`."""


def run_demo(
    workers: int, *, kill_at_step: int, as_json: bool, http: str | None = None, same_bits: bool = False
) -> int:
    """Trains on the digits with workers on this machine, kills and replaces one of them, and checks the result.

    `kill_at_step` is 0 for none. With `http` a page is served too, on a terminal until Enter or Ctrl-C. With
    `same_bits` it trains in microbatches, then once more on one worker without a failure, and compares the digests.

    Returns:
        The exit code of the first worker that failed, if any. Else 0 if the demo has shown what it promises, 1 if not.

    Raises:
        UsageError: scikit-learn is not installed, or with `http` what that needs.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError(f"the demo trains on the digits of scikit-learn: {install_command('demo')}")
    if kill_at_step and workers == 1:
        say("no worker will be killed: with one worker, training could not go on")
        kill_at_step = 0
    # With a power of two most worlds send one array each.
    microbatches = max(_MICROBATCHES, 1 << (workers - 1).bit_length()) if same_bits else 0
    page = None if http is None else str(endpoint(http or "127.0.0.1:0", default_port=0))
    with ExitStack() as serving:
        served = serving.enter_context(own_coordinator(http=page))
        say_where_the_page_is(served)
        say(f"{workers} worker{'s start: they load' if workers > 1 else ' starts: it loads'} NumPy and the digits")
        shown = Console(out=sys.stderr if as_json else sys.stdout)  # JSON has standard output to itself
        ledger, code = _train(served, workers, kill_at_step, microbatches, shown)
        if code:
            return code
        wrong, result = faults(ledger, kill=kill_at_step > 0), as_result(ledger) if ledger.ends else {}
        console = RichConsole(stderr=as_json, highlight=False, soft_wrap=True)
        if result:
            _show(console, result, ledger)
        if same_bits and result:
            say("the same run on one worker, without a failure")
            result["digests"] = [ledger.ends[0]["digest"], _digest_alone(kill_at_step, microbatches)]
            wrong += _compare(console, result)
        for text in wrong:
            console.print(text, style="red")
        if as_json:
            print_json(result)
        else:
            keep_the_page(served)
        return 1 if wrong else 0


def _train(served: Served, workers: int, kill_at_step: int, microbatches: int, console: Console) -> tuple[Ledger, int]:
    """Runs the workers; returns what they have noted, and the exit code."""
    settings = WorkerSettings(served.address, "demo", max(1, workers - 1), workers, token=served.token, at_once=workers)
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as notes, closing(console):
        options = {"workers": workers, "kill-at-step": kill_at_step, "microbatches": microbatches, "notes": notes}
        command = ["-m", "paceline.demo.train", *(f"--{name}={value}" for name, value in options.items())]
        outcome = launch(command, workers, settings, console, restarts=_RESTARTS if workers > 1 else 0)
        return Ledger.read(Path(notes)), outcome.code


def _digest_alone(kill_at_step: int, microbatches: int) -> str:
    """Trains on one worker; returns the digest of its state, empty if it failed."""
    with own_coordinator() as served:
        ledger, _ = _train(served, 1, kill_at_step, microbatches, Console(hidden={(0, "stdout")}))
    return ledger.ends[0]["digest"] if ledger.ends else ""


def _compare(console: RichConsole, result: dict[str, Any]) -> list[str]:
    """Shows the digests of both runs; returns what is wrong with them."""
    many, alone = result["digests"]
    causes = [recovery["cause"] for recovery in result["recoveries"]]
    story = ", ".join(f"{causes.count(cause)} {cause}" for cause in ("killed", "joined") if cause in causes)
    console.print(f"{many}  {result['world_size']} workers{f' ({story})' if story else ''}")
    console.print(f"{alone or 'no digest'}  1 worker")
    if many == alone:
        console.print("SHA-256 of weights, momentum and position: the same bits", style="bold green")
        return []
    return ["the digests differ: one worker does not compute the same bits"]


def as_result(ledger: Ledger) -> dict[str, Any]:
    """Returns the result as `--json` prints it."""
    end = ledger.ends[0]
    return {
        "accuracy": round(end["accuracy"], 4),
        "steps": end["steps"],
        "world_size": end["world_size"],
        "generations": len(set(ledger.counts.values())),
        "recoveries": [{"cause": each.cause, "recover_ms": round(each.ms, 1)} for each in ledger.recoveries()],
        "samples_once": ledger.samples_once(),
        "seconds": round(end["seconds"], 3),
    }


def faults(ledger: Ledger, *, kill: bool) -> list[str]:
    """Says what went wrong; empty if the demo has shown what it promises."""
    found, causes = ledger.faults(), {recovery.cause for recovery in ledger.recoveries()}
    if ledger.ends and ledger.ends[0]["accuracy"] < GOOD_ACCURACY:
        found.append(f"the accuracy is below {GOOD_ACCURACY:.0%}: training failed")
    if kill and "killed" not in causes:
        found.append("the others did not go on after a worker was killed")
    if kill and "joined" not in causes:
        found.append("training ended before a new worker had joined")
    return found


def _show(console: RichConsole, result: dict[str, Any], ledger: Ledger) -> None:
    for recovery in ledger.recoveries():
        console.print(recovery.text, style="yellow")
    good, world = result["accuracy"] >= GOOD_ACCURACY, result["world_size"]
    console.print(
        f"[bold {'green' if good else 'red'}]{result['accuracy']:.2%}[/] of the held-back fifth recognised "
        f"after {result['steps']} steps on {world} worker{'s'[: world != 1]}"
    )
    if result["samples_once"]:
        spite = ", though a worker was killed" if result["recoveries"] else ""
        epochs = result["steps"] // ledger.ends[0]["steps_per_epoch"]
        console.print(f"every sample was used exactly once in each of {epochs} epochs{spite}")
    if ledger.same_weights():
        console.print("all workers ended with the same weights")
    console.print(f"{result['steps'] / result['seconds']:.0f} steps per second, {result['seconds']:.1f} s")
