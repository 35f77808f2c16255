"""`paceline debug schedules`: shows how collectives work and which schedule is chosen when. It runs nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline._base.sum_order import Node
from paceline._base.terminal import UsageError
from paceline._collectives.choose import RULES, Choice, choose, format_rules, only
from paceline._collectives.rows import Row, SumRule, format_schedule
from paceline._collectives.schedules import ROOTED, SCHEDULES, chunks_of, rows_of
from paceline._microbatch.sum_tree import subtrees_by_rank
from paceline.cli.output import print_json
from paceline.cli.sizes import ELEMENT_BYTES, measured_size, parse_size, size_text

_NAMES = ", ".join(collective.replace("_", "-") for collective in SCHEDULES)


class ScheduleOptions(NamedTuple):
    """The options for one collective; None for those that were not given.

    `workers` is W, and `rank` the one whose rows to show. `hosts` is on how many hosts the ranks are, in order and
    evenly; None for ranks of which nothing is known. `microbatches` is V, for an all_reduce of those of a step.
    """

    workers: int | None = None
    size: str | None = None
    rank: int | None = None
    schedule: str | None = None
    hosts: int | None = None
    microbatches: int | None = None


class SchedulePlan(NamedTuple):
    """One rank's part in a collective; the root is rank 0.

    `bytes` is the size of the whole array, see `measured_size`. `chosen` is what the table of rules chooses, `schedule`
    the one that is shown. The rows refer to so many `chunks`. `nodes` is the host of each rank, from 0; empty if they
    are not known. `subtrees` are, with microbatches, those whose sums each rank sends (`sum_tree`).
    """

    collective: str
    world: int
    bytes: int
    chosen: Choice
    schedule: str
    chunks: int
    rank: int
    rows: list[Row]
    nodes: tuple[int, ...] = ()
    subtrees: tuple[tuple[Node, ...], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as `--json` prints it; null marks a side of a row that does nothing."""
        asked_for = self.schedule != self.chosen.schedule
        return {
            "collective": self.collective,
            "world_size": self.world,
            "bytes": self.bytes,
            "schedule": self.schedule,
            "reason": "asked for" if asked_for else self.chosen.reason,
            "chosen": self.chosen.schedule,
            "nodes": list(self.nodes),
            "rank": self.rank,
            "chunks": self.chunks,
            "rows": [_row_as_dict(row) for row in self.rows],
            **({"subtrees": [[list(node) for node in nodes] for nodes in self.subtrees]} if self.subtrees else {}),
        }

    def as_text(self) -> str:
        """Formats the plan for people."""
        of = f" of {size_text(self.bytes)}" if self.bytes else ""
        root = " from" if self.collective in ("broadcast", "scatter") else " to"
        root = f"{root} rank 0" if self.collective in ROOTED else ""
        ranks = f"{self.world} rank{'s'[: self.world != 1]}{self._on_hosts()}"
        lines = [f"{self.collective}{of}{root} among {ranks}: {self.chosen.schedule} ({self.chosen.reason})"]
        if self.schedule != self.chosen.schedule:
            lines.append(f"asked for: {self.schedule}")
        shown = (self.schedule, self.chosen.schedule)
        if others := [name for name in SCHEDULES[self.collective] if name not in shown]:
            lines.append(f"there is also: {', '.join(others)}")
        if self.subtrees:
            leaves = self.subtrees[-1][-1][1]
            lines += ["", f"each chunk is summed in a tree over {leaves} microbatches, from the ranks' sums:"]
            lines += [_subtrees_of(rank, nodes) for rank, nodes in enumerate(self.subtrees)]
        lines.append("")
        lines.append(f"rank {self.rank} by {self.schedule}, {self._chunks()}:")
        lines.append(format_schedule(self.rows) if self.rows else "nothing to send or receive")
        return "\n".join(lines)

    def _on_hosts(self) -> str:
        if not self.nodes:
            return ""
        hosts = self.nodes[-1] + 1
        here = [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank]]
        if hosts == 1:
            return " on 1 host"
        of = f"rank {here[0]}" if len(here) == 1 else f"ranks {here[0]} to {here[-1]}"
        return f" on {hosts} hosts (rank {self.rank}'s has {of})"

    def _chunks(self) -> str:
        parts = self.world if self.collective == "all_to_all" else self.chunks
        elements = -(-self.bytes // ELEMENT_BYTES // parts)
        most = "" if parts * elements * ELEMENT_BYTES == self.bytes else "at most "
        size = f"of {most}{size_text(elements * ELEMENT_BYTES)}" if self.bytes else "without bytes"
        if self.collective == "all_to_all":
            last = 2 * self.world - 1
            return f"chunks {size}: it sends 0 to {self.world - 1}, and receives {self.world} to {last}"
        return f"{self.chunks} chunk{'s'[: self.chunks != 1]} {size}"


def _subtrees_of(rank: int, nodes: tuple[Node, ...]) -> str:
    count = f"{len(nodes)} array{'s'[: len(nodes) != 1]} a frame"
    return f"rank {rank}: {count}, the sum{'s'[: len(nodes) != 1]} of {', '.join(f'{lo}-{hi - 1}' for lo, hi in nodes)}"


def show_schedules(collective: str | None, asked: ScheduleOptions, *, as_json: bool) -> None:
    """Shows the table of rules; or, for a collective, which schedule is chosen and one rank's rows of it."""
    if collective is not None:
        plan = make_plan(collective, asked)
        print_json(plan.as_dict()) if as_json else print(plan.as_text())
    elif asked != ScheduleOptions():
        raise UsageError(
            f"-n, --hosts, --size, --rank, --schedule and --microbatches need a collective: name one of {_NAMES}"
        )
    elif as_json:
        print_json({"rules": [{"collective": of, **rule._asdict()} for of, rules in RULES.items() for rule in rules]})
    else:
        print(format_rules())


def make_plan(collective: str, asked: ScheduleOptions) -> SchedulePlan:
    """Plans a collective, by default of 1 MiB among 4 ranks, seen from rank 0."""
    name = collective.replace("-", "_")
    if name not in SCHEDULES:
        raise UsageError(f"there are no schedules of {collective!r}: choose one of {_NAMES}")
    world = 4 if asked.workers is None else asked.workers
    rank = 0 if asked.rank is None else asked.rank
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} lies outside the world of {world}: choose one from 0 to {world - 1}")
    hosts = asked.hosts
    if hosts is not None and not 1 <= hosts <= world:
        raise UsageError(f"--hosts must be 1 to {world}, the number of ranks, not {hosts}")
    nodes = () if hosts is None else tuple(each * hosts // world for each in range(world))
    try:
        size = measured_size(name, parse_size("1MiB" if asked.size is None else asked.size), world)
        if asked.schedule is not None:
            only(name, asked.schedule)
    except ValueError as error:
        raise UsageError(str(error)) from None
    leaves = asked.microbatches
    if leaves is not None and (name != "all_reduce" or leaves < world):
        raise UsageError(
            f"--microbatches is for all-reduce, with one for each rank at least, not {leaves} for {world} ranks"
        )
    sums = SumRule.ALIKE if leaves is None else SumRule.IN_RANK_ORDER
    chosen = choose(name, size, world, sums=sums, nodes=nodes)
    if leaves is not None and asked.schedule is not None and SCHEDULES[name][asked.schedule].sums < sums:
        raise UsageError(
            f"{asked.schedule} does not sum an element at one rank, as a tree over microbatches needs: try direct"
        )
    schedule = chosen.schedule if asked.schedule is None else asked.schedule
    chunks = chunks_of(name, schedule, world, nodes)
    rows = rows_of(name, schedule, rank, world, nodes=nodes)
    subtrees = () if leaves is None else subtrees_by_rank(world, leaves)
    return SchedulePlan(name, world, size, chosen, schedule, chunks, rank, rows, nodes, subtrees)


def _row_as_dict(row: Row) -> dict[str, Any]:
    return {**row._asdict(), "action": None if row.recv_chunk is None else row.action.name.lower()}
