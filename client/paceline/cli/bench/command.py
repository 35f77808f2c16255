"""`paceline bench`: measures a collective between real processes, beside other implementations.

jobs.py      PURE: defines what is measured, and computes the figures
measure.py   the conductor: starts the contenders, and lets them take turns
rank.py      what every rank does, and Paceline's ranks
peers.py     Gloo's and Open MPI's ranks
plot.py      draws the picture
command.py   reads the options, and shows the rows
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from paceline._collectives.choose import RULES, Rule, Rules, dump_rules, format_rules
from paceline.cli.bench.jobs import MEMORIES, BenchRow, Job, make_row, plan, size_text
from paceline.cli.bench.measure import (
    BUDGET_S,
    LINKS,
    ContenderFailed,
    Measured,
    Recipe,
    measure,
    paceline_recipe,
    stage,
)
from paceline.cli.bench.peers import check_peer, peer_recipe
from paceline.cli.bench.plot import check_plot, lines_of, plot
from paceline.cli.output import UsageError, print_json, say
from paceline.config import LINKS as BETWEEN_PROCESSES


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of the command line.

    `links` and `vs` are names from `measure.LINKS` and `peers.PEERS`, separated by commas; without `links` all kinds
    between processes are measured, or the first of them when schedules are tuned. Each `schedule` is measured in turns.
    `seconds` are about those for each row. With `tune` all schedules are measured, and make a table of rules;
    `tune_out` implies it.
    """

    collective: str = "all-reduce"
    workers: int = 2
    sizes: str = "1KiB"
    links: str | None = None
    schedule: str | None = None
    vs: str | None = None
    memory: str = "any"
    place: str = "usual"
    seconds: float = BUDGET_S
    plot: Path | None = None
    tune: bool = False
    tune_out: Path | None = None
    as_json: bool = False

    @property
    def tunes(self) -> bool:
        """True if the command makes a table of rules."""
        return self.tune or self.tune_out is not None


def run_bench(asked: BenchOptions) -> int:
    """Measures collectives at each size, in all implementations and over all links; returns the exit code."""
    jobs, recipes = _jobs(asked), _recipes(asked)
    if asked.plot is not None:
        check_plot(asked.plot)
    if asked.tune_out is not None and not asked.tune_out.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {asked.tune_out.absolute().parent} for --tune-out")
    table = Table(RichConsole(stderr=asked.as_json), asked.workers)
    try:
        with stage(recipes, asked.workers) as contenders:
            for job in jobs:
                for result in measure(job, contenders, asked.seconds):
                    table.add(job, result)
    except ContenderFailed as error:
        say(str(error))
        return error.exit_code
    _tell(asked, table)
    return 0


def _jobs(asked: BenchOptions) -> list[Job]:
    if asked.tunes and (asked.schedule is not None or asked.vs is not None or len(_links(asked)) > 1):
        raise UsageError("--tune measures all schedules over one kind of link: leave out --schedule and --vs")
    if asked.memory not in MEMORIES:
        raise UsageError(f"--memory must be one of {', '.join(MEMORIES)}, not {asked.memory!r}")
    try:
        return plan(
            asked.collective,
            asked.workers,
            asked.sizes,
            asked.schedule,
            every_schedule=asked.tunes,
            place=asked.place,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _links(asked: BenchOptions) -> list[str]:
    if asked.links is None:
        return list(BETWEEN_PROCESSES[: 1 if asked.tunes else None])
    if not asked.links:
        raise UsageError(f"--links is empty: choose from {', '.join(LINKS)}")
    return _words(asked.links)


def _recipes(asked: BenchOptions) -> list[Recipe]:
    recipes = []
    for link in _links(asked):
        if link not in LINKS:
            raise UsageError(f"there is no kind of link {link!r}: choose from {', '.join(LINKS)}")
        recipes.append(paceline_recipe(link, asked.workers, asked.memory))
    for impl in _words(asked.vs or ""):
        check_peer(impl)
        recipes.append(peer_recipe(impl, asked.workers))
    return recipes


def _words(text: str) -> list[str]:
    """Splits a text at commas and drops repeated words; an empty text has none."""
    return list(dict.fromkeys(word.strip() for word in text.split(","))) if text else []


def _tell(asked: BenchOptions, table: Table) -> None:
    by_schedule = asked.schedule is not None or asked.tunes
    result: dict[str, Any] = {"rows": [_as_dict(row, by_schedule) for row in table.rows]}
    if table.notes:
        result |= {"notes": table.notes}
    if asked.tunes:
        rules = tuned_rules(table.rows)
        result |= json.loads(dump_rules(rules))
        if asked.tune_out is not None:
            asked.tune_out.write_text(dump_rules(rules) + "\n")
        if not asked.as_json:
            print(f"\n{format_rules({collective: rules[collective] for collective in _measured(table.rows)})}")
    if asked.plot is not None:
        plot(lines_of(table.rows, by_schedule=by_schedule), asked.workers, asked.plot)
    if asked.as_json:
        print_json(result)


def _measured(rows: list[BenchRow]) -> list[str]:
    return list(dict.fromkeys(row.collective for row in rows))


def _as_dict(row: BenchRow, by_schedule: bool) -> dict[str, object]:
    """Returns a row with the keys that scripts rely on, and with "schedule" only if it tells rows apart."""
    return {key: value for key, value in row.as_dict().items() if by_schedule or key != "schedule"}


class Table:
    """Shows each row as soon as it is measured, and keeps it; `notes` are about rows that are missing or differ."""

    def __init__(self, console: RichConsole, world: int) -> None:
        self.rows: list[BenchRow] = []
        self.notes: list[str] = []
        self._console = console
        self._world = world

    def add(self, job: Job, result: Measured) -> None:
        """Adds a row, or a note if the contender has no such collective."""
        contender = result.contender
        if result.lacks is not None:
            self._note(f"{contender.impl} cannot do {job.collective}: {result.lacks}")
            return
        last = result.turns[-1]
        link = link_name(last.links)
        if link != contender.link:
            self._note(f"{contender.impl} was asked to use {contender.link} links, but used {link or 'none'}")
        row = make_row(job.collective, last.schedule, link, self._world, job.bytes, result.seconds, impl=contender.impl)
        self.rows.append(row)
        self._show(row)

    def _show(self, row: BenchRow) -> None:
        if len(self.rows) == 1:
            head = f"{'collective':<15}{'impl':<10}{'schedule':<19}{'link':<9}{'W':>2}{'size':>10}"
            head += f"{'median us':>11}{'p10 us':>10}{'p99 us':>11}{'bus GB/s':>10}"
            self._console.print(head, style="bold", highlight=False, soft_wrap=True)
        self._console.print(
            f"{row.collective:<15}{row.impl:<10}{row.schedule or '-':<19}{row.link:<9}{row.world_size:>2}"
            f"{size_text(row.bytes):>10}{row.median_us:>11.1f}{row.p10_us:>10.1f}{row.p99_us:>11.1f}"
            f"{row.busbw_GBps:>10.3f}",
            highlight=False,
            soft_wrap=True,
        )

    def _note(self, text: str) -> None:
        if text not in self.notes:  # once, not for every size
            self.notes.append(text)
            self._console.print(f"paceline: {text}", highlight=False, soft_wrap=True)


def link_name(kinds: Sequence[str]) -> str:
    """Joins kinds of links as a row shows them: "shm+grpc"."""
    return "+".join(sorted(kinds, key=lambda kind: LINKS.index(kind) if kind in LINKS else len(LINKS)))


def tuned_rules(rows: Iterable[BenchRow], table: Rules = RULES) -> Rules:
    """Makes a table in which the rules for the fastest measured schedules come before the rules of `table`.

    `rows` are of one world size and one kind of link, of each schedule at each size. A new rule holds up to the world
    size that was measured, and up to the largest size at which its schedule was the fastest. For larger worlds, larger
    arrays and other collectives, the rules of `table` still hold.
    """
    best: dict[tuple[str, int], BenchRow] = {}
    for row in rows:
        key = (row.collective, row.bytes)
        if row.schedule is not None and (key not in best or row.median_us < best[key].median_us):
            best[key] = row
    tuned = dict(table)
    for collective, of in groupby(sorted(best), key=lambda key: key[0]):
        winners = [best[key] for key in of]
        spans = [list(span) for _, span in groupby(winners, key=lambda row: row.schedule)]
        rules = [_rule(span[-1]) for span in spans]
        tuned[collective] = (*rules, *table[collective])
    return tuned


def _rule(row: BenchRow) -> Rule:
    """Makes a rule from the largest of several successive sizes at which one schedule was the fastest."""
    assert row.schedule is not None
    return Rule(
        row.schedule,
        row.bytes,
        row.world_size,
        reason=f"measured: {row.bytes} B in {row.median_us:.0f} us over {row.link}, W={row.world_size}",
        # A result in shared memory says nothing about ranks with a network between them.
        where="one_node" if row.link == "shm" else "any",
    )
