"""Rows as people see them, each as it comes in."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console as RichConsole

from paceline.cli.bench.arithmetic import Row, make_row
from paceline.cli.bench.measure import Measured
from paceline.cli.bench.plan import Job
from paceline.cli.bench.recipes import LINKS
from paceline.cli.bench.sizes import size_text

__all__ = ["Table", "link_name"]


class Table:
    """Takes what was measured, shows it, and keeps it.

    Args:
        console: where to.
        world: number of ranks.

    Attributes:
        rows: all so far.
        notes: what a row cannot say, in sentences.
    """

    def __init__(self, console: RichConsole, world: int) -> None:
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._console = console
        self._world = world

    def add(self, job: Job, result: Measured) -> None:
        """A row of what was measured; or a note, if it could not be."""
        contender = result.contender
        if result.lacks is not None:
            self._note(f"{job.collective} is not in {contender.impl}: {result.lacks}")
            return
        last = result.turns[-1]
        link = link_name(last.links)
        if link != contender.link:
            self._note(f"{contender.impl} was asked to use {contender.link} links, and used {link or 'none'}")
        row = make_row(job.collective, last.schedule, link, self._world, job.bytes, result.seconds, impl=contender.impl)
        self.rows.append(row)
        self._show(row)

    def _show(self, row: Row) -> None:
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
        if text not in self.notes:  # once is enough, whatever the sizes
            self.notes.append(text)
            self._console.print(f"paceline: {text}", highlight=False, soft_wrap=True)


def link_name(kinds: Sequence[str]) -> str:
    """Kinds of links as a row has them: "shm+grpc"."""
    return "+".join(sorted(kinds, key=lambda kind: LINKS.index(kind) if kind in LINKS else len(LINKS)))
