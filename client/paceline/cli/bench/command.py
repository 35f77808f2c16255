"""`paceline bench`: who takes part, and what becomes of what was measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from paceline.cli.bench.arithmetic import Row
from paceline.cli.bench.calls import MEMORIES
from paceline.cli.bench.ensemble import ContenderFailed
from paceline.cli.bench.measure import BUDGET_S, measure
from paceline.cli.bench.plan import Job, plan
from paceline.cli.bench.plot import check_plot, lines_of, plot
from paceline.cli.bench.recipes import BETWEEN_PROCESSES, LINKS, Recipe, check_peer, paceline_recipe, peer_recipe
from paceline.cli.bench.stage import stage
from paceline.cli.bench.tune import tuned_rules
from paceline.cli.bench.view import Table
from paceline.cli.output import UsageError, print_json, say
from paceline.collectives.choose import dump_rules, format_rules

__all__ = ["Asked", "run_bench"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says.

    Attributes:
        collective: as the command line spells it; or "all".
        workers: world size.
        sizes: with commas, see `parse_sizes`.
        links: with commas, of `recipes.LINKS`; None for all between processes, or the best where schedules are tuned.
        schedule: names with commas, measured turn about, and then named in the rows; None for what is chosen.
        vs: other implementations, with commas, of `recipes.PEERS`; None for none.
        memory: one of `calls.MEMORIES`.
        place: of an all_reduce's sum, one of `plan.PLACES`.
        seconds: to measure for each row, about.
        plot: file for a picture.
        tune: measure all schedules, and make a table of rules.
        tune_out: file for the table; asks for it, too.
        as_json: the rows are standard output's last line.
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
        """True if a table of rules is to be made."""
        return self.tune or self.tune_out is not None


def run_bench(asked: Asked) -> int:
    """Measures a collective, or all of them, at each size, in all implementations and over all links in turn.

    Returns:
        The exit code.

    Raises:
        UsageError: something is asked for that cannot be measured.
        OSError: a file cannot be written.
    """
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


def _jobs(asked: Asked) -> list[Job]:
    if asked.tunes and (asked.schedule is not None or asked.vs is not None or len(_links(asked)) > 1):
        raise UsageError("--tune measures all schedules over one kind of link: leave out --schedule and --vs")
    if asked.memory not in MEMORIES:
        raise UsageError(f"there is no memory {asked.memory!r}: choose one of {', '.join(MEMORIES)}")
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


def _links(asked: Asked) -> list[str]:
    if asked.links is None:
        return list(BETWEEN_PROCESSES[: 1 if asked.tunes else None])
    if not asked.links:
        raise UsageError(f"--links names no link: choose of {', '.join(LINKS)}")
    return _words(asked.links)


def _recipes(asked: Asked) -> list[Recipe]:
    recipes = []
    for link in _links(asked):
        if link not in LINKS:
            raise UsageError(f"there is no link {link!r}: this version measures {', '.join(LINKS)}")
        recipes.append(paceline_recipe(link, asked.workers, asked.memory))
    for impl in _words(asked.vs or ""):
        check_peer(impl)
        recipes.append(peer_recipe(impl, asked.workers))
    return recipes


def _words(text: str) -> list[str]:
    """Words with commas, each once; none of an empty text."""
    return list(dict.fromkeys(word.strip() for word in text.split(","))) if text else []


def _tell(asked: Asked, table: Table) -> None:
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


def _measured(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.collective for row in rows))


def _as_dict(row: Row, by_schedule: bool) -> dict[str, object]:
    """Rows have the keys that scripts rely on, and one more only where it is needed to tell rows apart."""
    return {key: value for key, value in row.as_dict().items() if by_schedule or key != "schedule"}
