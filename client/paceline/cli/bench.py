"""`paceline bench`: measures collectives as nccl-tests does; its ranks are a job for each kind of link."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from paceline._base.terminal import UsageError
from paceline._collectives.choose import RULES, Rule, Rules, dump_rules, only
from paceline._collectives.schedules import SCHEDULES
from paceline.cli.launcher import Worker, WorkerSettings
from paceline.cli.launcher.console import Console
from paceline.cli.output import print_json
from paceline.cli.run import launch
from paceline.cli.sizes import measured_size, parse_sizes, size_text
from paceline.config import LINKS
from paceline.launch._own_coordinator import own_coordinator

COLLECTIVES = (*(name.replace("_", "-") for name in SCHEDULES if name != "barrier"), "send-recv", "barrier")
"""The collectives that can be measured, as the command line spells them. In send-recv each rank sends to the next."""

Job = tuple[str, int, list[str | None]]
"""One measurement: the collective, the bytes of its array, and schedules; None for the one that Paceline chooses."""


def run_bench(jobs: list[Job], links: list[str], world: int, tune_out: Path | None, as_json: bool, **how: Any) -> int:
    """Measures all jobs over one kind of link after the other, as the ranks are told `how`; returns the exit code."""
    with closing(RowConsole(sys.stderr if as_json else sys.stdout)) as console:
        for link in links:
            with own_coordinator() as served:
                settings = WorkerSettings(served.address, "bench", world, world, "127.0.0.1", token=served.token)
                command = ["-m", "paceline.cli.bench_rank", json.dumps({"jobs": jobs, "link": link, **how})]
                if code := launch(command, world, settings, console).code:
                    return code
    result: dict[str, Any] = {"rows": console.rows}
    if tune_out is not None:
        rules = dump_rules(tuned_rules(console.rows))
        tune_out.write_text(f"{rules}\n")
        result |= json.loads(rules)
    if as_json:
        print_json(result)
    return 0


def plan_jobs(collective: str, world: int, sizes: str, schedule: str | None) -> list[Job]:
    """Lists the jobs that the command line asks for; raises a UsageError if there is no such collective or schedule."""
    if collective not in (*COLLECTIVES, "all"):
        raise UsageError(f"cannot measure {collective!r}: choose one of {', '.join(COLLECTIVES)}, or all")
    jobs: list[Job] = []
    try:
        for name in COLLECTIVES if collective == "all" else [collective]:
            name = name.replace("-", "_")
            schedules: list[str | None] = [None]
            if schedule is not None:
                named = SCHEDULES.get(name, ())
                schedules = [*named] if schedule == "all" or not named else [*words_of(schedule)]
                for word in schedules:
                    only(name, str(word))  # raises for an unknown one
            whole = dict.fromkeys(measured_size(name, size, world) for size in parse_sizes(sizes))
            jobs += [(name, size, schedules) for size in whole if schedules]
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not jobs:
        raise UsageError(f"{collective} has no schedules to choose from")
    return jobs


def plan_links(links: str, tune_out: Path | None) -> list[str]:
    """Lists the kinds of links to measure, of which a table needs just one; raises a UsageError if it cannot be."""
    found = words_of(links)
    if unknown := [link for link in found if link not in LINKS]:
        raise UsageError(f"there is no kind of link {unknown[0]!r}: choose from {', '.join(LINKS)}")
    if tune_out is not None and len(found) > 1:
        raise UsageError("--tune-out is for one kind of link: name one (--links)")
    if tune_out is not None and not tune_out.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {tune_out.absolute().parent} for --tune-out")
    return found


def words_of(text: str) -> list[str]:
    """Splits a text at commas and drops repeated words."""
    return list(dict.fromkeys(word.strip() for word in text.split(",")))


class RowConsole(Console):
    """Shows each row as soon as it is measured, and keeps it; else it shows what `paceline run` shows."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out=out)
        self.rows: list[dict[str, Any]] = []

    def record(self, worker: Worker, record: dict[str, Any]) -> None:
        """Takes a row from rank 0; leaves other records to `Console`."""
        if record.get("kind") != "row":
            super().record(worker, record)
            return
        if not self.rows:
            self._show("collective", "schedule", "link", "W", "size", "median us", "p10 us", "p99 us", "bus GB/s")
        self.rows.append({name: value for name, value in record.items() if name != "kind"})
        collective, schedule, link, world, size, *figures = self.rows[-1].values()
        self._show(collective, schedule or "-", link, world, size_text(size), *figures)

    def _show(self, *cells: object) -> None:
        sides = ("<15", "<19", "<9", ">2", ">10", ">11", ">10", ">11", ">10")
        self.show("".join(format(str(cell), side) for cell, side in zip(cells, sides, strict=True)))


def tuned_rules(rows: list[dict[str, Any]], table: Rules = RULES) -> Rules:
    """Makes a table in which the rules for the fastest measured schedules come before the rules of `table`.

    A new rule holds up to the world size that was measured, and up to the largest of successive sizes at which its
    schedule was the fastest. For larger worlds, larger arrays and other collectives, the rules of `table` still hold.
    """
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["median_us"]):
        if row["schedule"] is not None:
            best.setdefault((row["collective"], row["bytes"]), row)
    tuned = dict(table)
    for collective, keys in groupby(sorted(best), key=lambda key: key[0]):
        spans = [list(span) for _, span in groupby((best[key] for key in keys), key=lambda row: row["schedule"])]
        tuned[collective] = (*(_rule(**span[-1]) for span in spans), *table[collective])
    return tuned


def _rule(*, schedule: str, link: str, world_size: int, bytes: int, median_us: float, **_: object) -> Rule:
    reason = f"measured: {bytes} B in {median_us:.0f} us over {link}, W={world_size}"
    # A result in shared memory says nothing about ranks with a network between them.
    return Rule(schedule, bytes, world_size, reason=reason, where="one_node" if link == "shm" else "any")
