"""Measures a collective of Paceline, Gloo and Open MPI in one run, in turns: python bench/compare.py --help.

jobs.py        PURE: defines what is measured, and computes the figures
conductor.py   starts the contenders, and lets them take turns
contenders.py  what every rank does, and Paceline's ranks
peers.py       Gloo's and Open MPI's ranks
plot.py        draws the picture
compare.py     reads the options, and shows the rows
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console as RichConsole

from conductor import BUDGET_S, LINKS, ContenderFailed, Measured, Recipe, measure, paceline_recipe, stage
from jobs import MEMORIES, BenchRow, Job, make_row, plan
from paceline._base.terminal import UsageError, say
from paceline.cli.output import one_line_errors, print_json
from paceline.cli.sizes import size_text
from peers import check_peer, peer_recipe
from plot import check_plot, lines_of, plot


def main(
    collective: Annotated[str, typer.Argument(help="As for paceline bench.")] = "all-reduce",
    workers: Annotated[int, typer.Option("-n", "--workers", min=2, max=64, help="Ranks of each contender.")] = 2,
    sizes: Annotated[str, typer.Option(help="As for paceline bench.")] = "1KiB,64KiB,1MiB,16MiB",
    links: Annotated[str, typer.Option(help="Kinds of Paceline's links: shm, tcp, grpc, local.")] = "shm,tcp,grpc",
    schedule: Annotated[str | None, typer.Option(metavar="NAME[,NAME]", help="Paceline's schedules.")] = None,
    vs: Annotated[str, typer.Option(metavar="NAME[,NAME]", help="Other implementations: gloo, openmpi.")] = "",
    memory: Annotated[str, typer.Option(help="Paceline's arrays: NumPy's (any), or group.empty (group).")] = "any",
    place: Annotated[
        str,
        typer.Option(
            help="Where an all-reduce's sum goes: in (place), out (another array), usual (each library's default)."
        ),
    ] = "usual",
    seconds: Annotated[float, typer.Option(min=0.001, help="About how many seconds to measure for a row.")] = BUDGET_S,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Plot bus bandwidth against size in this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON on standard output.")] = False,
) -> None:
    """Measure a collective in several implementations and over several kinds of links, in turns."""
    with one_line_errors():
        if memory not in MEMORIES:
            raise UsageError(f"--memory must be one of {', '.join(MEMORIES)}, not {memory!r}")
        try:
            jobs = plan(collective, workers, sizes, schedule, place=place)
        except ValueError as error:
            raise UsageError(str(error)) from None
        recipes = recipes_of(links, vs, workers, memory)
        if picture is not None:
            check_plot(picture)
        table = Table(RichConsole(stderr=as_json), workers)
        try:
            with stage(recipes, workers) as contenders:
                for job in jobs:
                    for result in measure(job, contenders, seconds):
                        table.add(job, result)
        except ContenderFailed as error:
            say(str(error))
            raise typer.Exit(error.exit_code) from None
        if picture is not None:
            plot(lines_of(table.rows, by_schedule=schedule is not None), workers, picture)
        if as_json:
            result: dict[str, Any] = {"rows": [row.as_dict() for row in table.rows]}
            print_json(result | ({"notes": table.notes} if table.notes else {}))


def recipes_of(links: str, vs: str, world: int, memory: str) -> list[Recipe]:
    """Lists the contenders that the command line asks for.

    Raises:
        UsageError: there is no such kind of link or implementation, or it is not installed.
    """
    recipes = []
    for link in _words(links):
        if link not in LINKS:
            raise UsageError(f"there is no kind of link {link!r}: choose from {', '.join(LINKS)}")
        recipes.append(paceline_recipe(link, world, memory))
    for impl in _words(vs) if vs else []:
        check_peer(impl)
        recipes.append(peer_recipe(impl, world))
    return recipes


def _words(text: str) -> list[str]:
    """Splits a text at commas and drops repeated words."""
    return list(dict.fromkeys(word.strip() for word in text.split(",")))


class Table:
    """Shows each row as soon as it is measured, and keeps it.

    Args:
        console: where to print.
        world: number of ranks.

    Attributes:
        rows: all rows so far.
        notes: sentences about rows that are missing, or that differ from what was requested.
    """

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


if __name__ == "__main__":
    typer.run(main)
