"""Kills ranks of replicas in Paceline and in torchft, on one machine, in turns: python bench/replicas.py --help.

    make torchft                                            once: an environment for torchft
    .venv-peers/bin/python bench/replicas.py --vs torchft   three replicas of two ranks each

replica_contenders.py  what every rank does: the same toy transformer, divided by FSDP2 inside each replica
replica_jobs.py        the jobs, and what their ranks tell
replicas.py            kills, computes the figures, and shows them

In a round each contender has a job of its own, one after the other, in which ranks are killed at random moments. After
each kill the replica comes back before the next one is killed.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, NamedTuple

import typer
from rich.console import Console as RichConsole

from paceline._base.terminal import UsageError, say
from paceline.cli.output import one_line_errors, print_json
from replica_jobs import LIGHTHOUSE, RANKS, REPLICAS, TORCHFT, Job, Rank, kill, start

SIZES = {10: (2, 192), 100: (2, 576)}
"""Layers and width of the model by about how many MB its weights and AdamW's moments have."""

_SETTLED = 10
"""Steps that all replicas make together before a rank is killed."""

_MOMENTS_S = 0.2
"""A rank is killed after so many seconds at most, drawn at random, so at any moment of a step."""


@dataclass(slots=True)
class Result:
    """The measured effects of kills on a contender.

    Attributes:
        recovered: seconds from each kill until all survivors had committed a step without the killed replica.
        back: seconds from when all ranks of the new replica were ready until all had committed a step.
        failed: attempts at a step that survivors made for nothing, for each kill.
        lost: samples that were drawn and entered no committed step, in all.
        twice: samples that entered two committed steps, in all.
        steps: seconds between two commits without a failure.
    """

    contender: str
    recovered: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    lost: int = 0
    twice: int = 0
    steps: list[float] = field(default_factory=list)

    @staticmethod
    def p90(values: Sequence[float]) -> float:
        """Returns the 90th percentile."""
        return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


class Attempt(NamedTuple):
    """One rank's attempt at a step in one view; `counts` is True if its gradients were added to those of others."""

    step: int
    view: int
    at: float
    samples: list[int]
    counts: bool
    committed: bool


def main(
    vs: Annotated[str, typer.Option(metavar="NAME[,NAME]", help=f"Beside: {', '.join(LIGHTHOUSE)} or all.")] = "",
    kills: Annotated[int, typer.Option(min=1, help="Kills in each job.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Jobs of each contender.")] = 3,
    megabytes: Annotated[int, typer.Option(help="MB of state of each replica: 10 or 100.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed for the choice of ranks and moments.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on standard output.")] = False,
) -> None:
    """Kill ranks of replicas, and measure what that costs."""
    with one_line_errors():
        if megabytes not in SIZES:
            raise UsageError(f"--megabytes must be 10 or 100, not {megabytes}")
        others = list(LIGHTHOUSE) if vs == "all" else [name.strip() for name in vs.split(",") if name]
        for name in others:
            check(name)
        results = [Result(name) for name in ("paceline", *others)]
        dice = random.Random(seed)
        for number in range(rounds):
            for result in results:
                measure(result, kills, SIZES[megabytes], dice)
                say(f"round {number + 1} of {rounds}: {result.contender}")
        show(results, RichConsole(stderr=as_json))
        if as_json:
            print_json({"megabytes": megabytes, "results": [asdict(result) for result in results]})


def check(contender: str) -> None:
    """Checks that torchft is there; otherwise the error says how to install it."""
    if contender not in LIGHTHOUSE:
        raise UsageError(f"there is no {contender!r} to compare with: choose from {', '.join(LIGHTHOUSE)}")
    if not (TORCHFT / "torchft_lighthouse").exists():
        raise UsageError("--vs needs torchft in an environment of its own: make torchft")


def measure(result: Result, kills: int, size: tuple[int, int], dice: random.Random) -> None:
    """Adds what so many kills did to one job of a contender."""
    with tempfile.TemporaryDirectory(prefix="replicas-") as folder:
        job = start(result.contender, Path(folder), size)
        try:
            _wait_until_settled(job)
            for _ in range(kills):
                _kill_one(job, result, dice)
            end = time.monotonic()
            job.wait_until(lambda: all(len(r.after(end, "commit")) > 3 for r in job.alive()), "the last steps")
        finally:
            job.close()
    entered, drawn = account(job.ranks.values(), end)
    result.lost += len(drawn - entered.keys())
    result.twice += sum(count > 1 for count in entered.values())


def _wait_until_settled(job: Job) -> list[Rank]:
    """Waits until six ranks have committed some steps together; returns them."""

    def settled() -> bool:
        ranks = job.alive()
        if len(ranks) < REPLICAS * RANKS:
            return False
        last = [rank.after(0.0, "commit")[-_SETTLED:] for rank in ranks]
        views = {(commit["view"], commit["replicas"]) for commits in last for commit in commits}
        return len(views) == 1 and views.pop()[1] == REPLICAS and all(len(commits) == _SETTLED for commits in last)

    job.wait_until(settled, f"{REPLICAS} replicas together")
    return job.alive()


def _kill_one(job: Job, result: Result, dice: random.Random) -> None:
    ranks = _wait_until_settled(job)
    known = set(job.ranks)
    victim = dice.choice(sorted(ranks, key=lambda rank: rank.pid))
    survivors = [rank for rank in ranks if rank.life != victim.life]
    view = survivors[0].after(0.0, "commit")[-1]["view"]
    moments = [commit["at"] for commit in survivors[0].after(0.0, "commit")[-_SETTLED:]]
    result.steps += [after - before for before, after in itertools.pairwise(moments)]
    time.sleep(dice.uniform(0.0, _MOMENTS_S))
    at = kill(victim)

    def first(rank: Rank) -> float | None:
        return next((commit["at"] for commit in rank.after(at, "commit") if commit["view"] != view), None)

    job.wait_until(lambda: all(first(rank) is not None for rank in survivors), "survivors go on")
    result.recovered.append(max(moment for rank in survivors if (moment := first(rank))) - at)
    new = [rank for rank in _wait_until_settled(job) if rank.pid not in known]
    ready = max(rank.after(at, "ready")[0]["at"] for rank in new)
    result.back.append(max(rank.after(at, "commit")[0]["at"] for rank in new) - ready)
    made = [attempts(rank)[:-1] for rank in survivors]  # the last one may not have ended
    begun = [max(a.at for a in each if a.at <= at) for each in made]
    failed = [sum(not a.committed and a.at >= since for a in each) for each, since in zip(made, begun, strict=True)]
    result.failed.append(max(failed))


def attempts(rank: Rank) -> list[Attempt]:
    """Returns a rank's attempts at steps.

    A commit counts only if the rank lived on: what a killed one has committed alone, the others have undone.
    """
    made: list[Attempt] = []
    for event in rank.events:
        match event["event"]:
            case "begin":
                made.append(Attempt(event["step"], event["view"], event["at"], event["samples"], True, False))
            case "end":
                made[-1] = made[-1]._replace(step=event["step"], view=event["view"], counts=event["takes_part"])
            case "commit":
                made[-1] = made[-1]._replace(committed=True)
    return made


def account(ranks: Iterable[Rank], end: float) -> tuple[Counter[int], set[int]]:
    """Counts how often each sample entered a committed step, and lists those that were drawn before a time.

    A replica's samples entered a step if it took part in its sums, and any replica that lived on has committed it.
    """
    made = [attempts(rank) for rank in ranks]
    committed = {(a.step, a.view) for each in made for a in each[:-1] if a.committed}
    every = [a for each in made for a in each]
    entered = Counter(n for a in every if a.counts and (a.step, a.view) in committed for n in a.samples)
    return entered, {n for a in every if a.at < end for n in a.samples}


def show(results: Sequence[Result], console: RichConsole) -> None:
    """Prints a table."""
    head = f"{'contender':<14}{'kills':>6}{'recovered p50':>15}{'p90':>8}{'back p50':>10}{'p90':>8}{'failed':>8}"
    console.print(f"{head}{'lost':>7}{'twice':>7}{'step':>9}", style="bold", highlight=False, soft_wrap=True)
    for r in results:
        kills = len(r.recovered)
        console.print(
            f"{r.contender:<14}{kills:>6}{median(r.recovered):>13.3f} s{r.p90(r.recovered):>6.3f} s"
            f"{median(r.back):>8.3f} s{r.p90(r.back):>6.3f} s{sum(r.failed) / kills:>8.1f}"
            f"{r.lost / kills:>7.1f}{r.twice / kills:>7.1f}{1e3 * median(r.steps):>6.1f} ms",
            highlight=False,
            soft_wrap=True,
        )


if __name__ == "__main__":
    typer.run(main)
