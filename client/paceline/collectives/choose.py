"""The choice among schedules: a table of rules, by bytes, world size and nodes, which all ranks share.

The first rule that holds decides. Bytes are those of the whole array: of each rank's array where arrays are reduced or
spread, of all of them together where they are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from paceline.collectives.programs import SCHEDULES
from paceline.collectives.rows import Nodes, Sums

__all__ = ["RULES", "Choice", "Rule", "Rules", "Where", "choose", "format_rules", "only", "where_of"]

Where: TypeAlias = Literal["any", "one_node", "shared_nodes"]
"""Which ranks a rule is for: any; all on one node, in shared memory; on several nodes, of which one has several."""


class Rule(NamedTuple):
    """A schedule, and when it is taken.

    Attributes:
        schedule: its name.
        max_bytes: up to here; None for any size.
        max_world: up to here; None for any world.
        max_incast: bytes that the busiest rank takes in from all others, W-1 arrays, up to here; None for any number.
        reason: one line for people.
        where: which ranks it is for.
    """

    schedule: str
    max_bytes: int | None = None
    max_world: int | None = None
    max_incast: int | None = None
    reason: str = ""
    where: Where = "any"

    def holds(self, nbytes: int, world: int, where: Where) -> bool:
        """True if the rule is for this size and world."""
        return (
            self.where in ("any", where)
            and (self.max_bytes is None or nbytes <= self.max_bytes)
            and (self.max_world is None or world <= self.max_world)
            and (self.max_incast is None or nbytes * (world - 1) <= self.max_incast)
        )


class Choice(NamedTuple):
    """A schedule by name, and why."""

    schedule: str
    reason: str


Rules: TypeAlias = Mapping[str, tuple[Rule, ...]]

_KIB, _MIB = 1 << 10, 1 << 20

RULES: Rules = {
    "all_reduce": (
        Rule("recursive_doubling", 256 * _KIB, 4, None, "log2 W steps, and few ranks send more than by the star"),
        Rule("star", 256 * _KIB, None, _MIB, "2 steps and the fewest frames, and little for rank 0 to take in"),
        Rule("recursive_doubling", 256 * _KIB, None, None, "log2 W steps: too many ranks for the star"),
        Rule("recursive_doubling", 512 * _KIB, 4, None, "a copy costs less than to wait until it is read", "one_node"),
        Rule("hierarchical", reason="a node's sum crosses the network, not each rank's", where="shared_nodes"),
        Rule("direct", None, 4, None, "2 steps, and every link has an equal share"),
        Rule("halving_doubling", _MIB, None, None, "2 log2 W steps, every rank an equal share, log2 W links a rank"),
        Rule("direct", None, 16, None, "2 steps, and every link has an equal share; W-1 links a rank are affordable"),
        Rule("ring", reason="every rank has an equal share and two links"),
    ),
    "reduce": (
        Rule("star", 64 * _KIB, None, _MIB, "1 step, and little for the root to take in"),
        Rule("tree", reason="segments flow up; nobody takes in more than two arrays"),
    ),
    "reduce_scatter": (
        Rule("direct", None, 16, None, "1 step, and every link has an equal share"),
        Rule("ring", reason="every rank has an equal share and two links"),
    ),
    "broadcast": (
        Rule("tree", 16 * _MIB, None, None, "segments flow down; nobody sends more than two arrays"),
        Rule("tree", None, 7, None, "likewise"),
        Rule("scatter_all_gather", reason="leaves of the tree help: nobody sends much more than one array"),
    ),
    "scatter": (Rule("direct", reason="each part goes where it belongs"),),
    "all_gather": (
        Rule("direct", None, 3, None, "1 step, and every link has an equal share"),
        Rule("bruck", _MIB, None, None, "log2 W steps and links a rank"),
        Rule("direct", None, 16, None, "1 step; W-1 links a rank are affordable"),
        Rule("ring", reason="every rank has an equal share and two links"),
    ),
    "gather": (Rule("direct", reason="each part goes where it belongs"),),
    "all_to_all": (Rule("pairwise", reason="each part goes where it belongs"),),
    "barrier": (
        Rule("dissemination", None, 2, None, "1 step", "one_node"),
        Rule("star", None, 8, None, "all but one wait once: ranks that share cores are switched to least", "one_node"),
        Rule("dissemination", reason="log2 W steps"),
    ),
}
"""Source: medians over gRPC on loopback, W=2, 3, 4 and 8 processes on 2 cores (docs/decisions/016; `paceline bench
--schedule` repeats them). Beyond W=8 the rules follow from the number of steps, bytes and links."""


def choose(
    collective: str, nbytes: int, world: int, *, sums: Sums = Sums.ALIKE, rules: Rules = RULES, nodes: Nodes = ()
) -> Choice:
    """The schedule for a collective; the same on all ranks that ask for the same.

    Args:
        collective: "all_reduce", ...
        nbytes: bytes of the whole array.
        world: number of ranks.
        sums: only schedules that combine an element at least so will do.
        rules: the table.
        nodes: the node of each rank.
    """
    fit, where = rules[collective], where_of(nodes)
    if sums is not Sums.ALIKE:
        fit = _fit(rules, collective, sums) or _fit(RULES, collective, sums)
    for rule in fit:
        if rule.holds(nbytes, world, where):
            return Choice(rule.schedule, rule.reason)
    return Choice(fit[-1].schedule, "the only one left that sums as it must")


@lru_cache(maxsize=64)
def where_of(nodes: Nodes) -> Where:
    """What the nodes of the ranks are for the rules; "any" if each is on one of its own, or nothing is known."""
    count = len(set(nodes))
    if count == 1:
        return "one_node"
    return "shared_nodes" if 1 < count < len(nodes) else "any"


def only(collective: str, schedule: str) -> Rules:
    """The table with one schedule for a collective at every size, but where it does not sum as it must.

    Raises:
        ValueError: there is no such schedule; the text names those that there are.
    """
    if schedule not in SCHEDULES[collective]:
        names = ", ".join(SCHEDULES[collective])
        raise ValueError(f"there is no schedule {schedule!r} for {collective}: there are {names}")
    return {**RULES, collective: (Rule(schedule, reason="asked for"),)}


def format_rules(rules: Rules = RULES) -> str:
    """The table for people."""
    rows = [("collective", "schedule", "when", "why")]
    for collective, of in rules.items():
        for index, rule in enumerate(of):
            rows.append(("" if index else collective, rule.schedule, _when(rule), rule.reason))
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:3]]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows)


def _fit(rules: Rules, collective: str, sums: Sums) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules[collective] if SCHEDULES[collective][rule.schedule].sums >= sums)


def _when(rule: Rule) -> str:
    limits = [
        f"at most {_size(rule.max_bytes)}" if rule.max_bytes is not None else "",
        f"W at most {rule.max_world}" if rule.max_world is not None else "",
        f"(W-1) arrays at most {_size(rule.max_incast)}" if rule.max_incast is not None else "",
        {"any": "", "one_node": "on one node", "shared_nodes": "several ranks on a node of several"}[rule.where],
    ]
    return ", ".join(filter(None, limits)) or "else"


def _size(nbytes: int) -> str:
    return f"{nbytes // _KIB} KiB" if nbytes % _MIB else f"{nbytes // _MIB} MiB"
