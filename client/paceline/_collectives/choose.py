"""Chooses schedules by a table of rules on bytes, world size and nodes, which all ranks share. Pure, except for files.

The first rule that holds decides. Bytes count the whole array: each rank's array in a reduction or broadcast,
all ranks' arrays together in a gather.

`paceline bench --tune-out` writes tables that suit a machine, as JSON: {"rules": {collective: [rule, ...]}}, where a
rule has the fields of `Rule`. Paceline's own rules apply to a collective that the file leaves out. All members of a job
must have the same table: its digest is one of the settings on which they agree, so all ranks of a view choose alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from paceline._collectives.rows import Nodes, SumRule
from paceline._collectives.schedules import SCHEDULES
from paceline._links.base import Peer

Where: TypeAlias = Literal["any", "one_node", "shared_nodes"]
"""Where the ranks of a rule are: anywhere; all on one node, in shared memory; on several nodes, one with several."""


class Rule(NamedTuple):
    """A schedule, the conditions under which it is chosen (None for any), and the reason in a line for people.

    `max_incast` is the most bytes that one rank may receive from all others, (W - 1) times the array.
    """

    schedule: str
    max_bytes: int | None = None
    max_world: int | None = None
    max_incast: int | None = None
    reason: str = ""
    where: Where = "any"

    def holds(self, nbytes: int, world: int, where: Where) -> bool:
        """Returns True if the rule applies to this size and world."""
        return (
            self.where in ("any", where)
            and (self.max_bytes is None or nbytes <= self.max_bytes)
            and (self.max_world is None or world <= self.max_world)
            and (self.max_incast is None or nbytes * (world - 1) <= self.max_incast)
        )


class Choice(NamedTuple):
    """The name of the chosen schedule, and the reason."""

    schedule: str
    reason: str


Rules: TypeAlias = Mapping[str, tuple[Rule, ...]]

_KIB, _MIB = 1 << 10, 1 << 20

RULES: Rules = {
    "all_reduce": (
        Rule("recursive_doubling", 256 * _KIB, 4, None, "log2 W steps, and few ranks send more than with the star"),
        Rule("star", 256 * _KIB, None, _MIB, "2 steps and the fewest frames, and rank 0 receives little"),
        Rule("recursive_doubling", 256 * _KIB, None, None, "log2 W steps: too many ranks for the star"),
        Rule("recursive_doubling", 512 * _KIB, 4, None, "copying costs less than waiting until it is read", "one_node"),
        Rule(
            "hierarchical", reason="one sum per node crosses the network, not one array per rank", where="shared_nodes"
        ),
        Rule("direct", None, 4, None, "2 steps, and every link has an equal share"),
        Rule("halving_doubling", _MIB, None, None, "2 log2 W steps, every rank an equal share, log2 W links a rank"),
        Rule("direct", None, 16, None, "2 steps, and every link has an equal share; W-1 links a rank are affordable"),
        Rule("ring", reason="every rank has an equal share and two links"),
    ),
    "reduce": (
        Rule("star", 64 * _KIB, None, _MIB, "1 step, and the root receives little"),
        Rule("tree", reason="segments flow up; no rank receives more than two arrays"),
    ),
    "reduce_scatter": (
        Rule("direct", None, 16, None, "1 step, and every link has an equal share"),
        Rule("ring", reason="every rank has an equal share and two links"),
    ),
    "broadcast": (
        Rule("tree", 16 * _MIB, None, None, "segments flow down; no rank sends more than two arrays"),
        Rule("tree", None, 7, None, "likewise"),
        Rule("scatter_all_gather", reason="the leaves of the tree send too: no rank sends much more than one array"),
    ),
    "scatter": (Rule("direct", reason="each part goes directly to its receiver"),),
    "all_gather": (
        Rule("direct", None, 3, None, "1 step, and every link has an equal share"),
        Rule("bruck", _MIB, None, None, "log2 W steps and links a rank"),
        Rule("direct", None, 16, None, "1 step; W-1 links a rank are affordable"),
        Rule("ring", reason="every rank has an equal share and two links"),
    ),
    "gather": (Rule("direct", reason="each part goes directly to its receiver"),),
    "all_to_all": (Rule("pairwise", reason="each part goes directly to its receiver"),),
    "barrier": (
        Rule("dissemination", None, 2, None, "1 step", "one_node"),
        Rule(
            "star",
            None,
            8,
            None,
            "all but one rank wait once: the fewest switches between ranks that share cores",
            "one_node",
        ),
        Rule("dissemination", reason="log2 W steps"),
    ),
}
"""Source: medians over gRPC on loopback, W=2, 3, 4 and 8 processes on 2 cores (docs/decisions/09; `paceline bench
--schedule` repeats them). Beyond W=8 the rules follow from the number of steps, bytes and links."""


def choose(
    collective: str,
    nbytes: int,
    world: int,
    *,
    sums: SumRule = SumRule.ALIKE,
    rules: Rules = RULES,
    nodes: Nodes = (),
) -> Choice:
    """Returns the schedule for a collective: the same on all ranks that pass the same arguments.

    `nbytes` is the size of the whole array. `sums` is the weakest order of summation that a schedule may have.
    """
    fit, where = rules[collective], where_of(nodes)
    if sums is not SumRule.ALIKE:
        fit = _fit(rules, collective, sums) or _fit(RULES, collective, sums)
    for rule in fit:
        if rule.holds(nbytes, world, where):
            return Choice(rule.schedule, rule.reason)
    return Choice(fit[-1].schedule, "the only schedule left that sums in the required order")


@lru_cache(maxsize=64)
def where_of(nodes: Nodes) -> Where:
    """Classifies the ranks' nodes for the rules; "any" if each rank has a node of its own, or nothing is known."""
    count = len(set(nodes))
    if count == 1:
        return "one_node"
    return "shared_nodes" if 1 < count < len(nodes) else "any"


def only(collective: str, schedule: str) -> Rules:
    """Returns the table with one schedule for a collective at every size, except where a call needs another order.

    A ValueError lists the valid schedules if there is no such one.
    """
    if schedule not in SCHEDULES[collective]:
        names = ", ".join(SCHEDULES[collective])
        raise ValueError(f"there is no schedule {schedule!r} for {collective}; the schedules are {names}")
    return {**RULES, collective: (Rule(schedule, reason="asked for"),)}


def format_rules(rules: Rules = RULES) -> str:
    """Formats the table for people."""
    rows = [("collective", "schedule", "when", "why")]
    for collective, of in rules.items():
        for index, rule in enumerate(of):
            rows.append(("" if index else collective, rule.schedule, _when(rule), rule.reason))
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:3]]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows)


def _fit(rules: Rules, collective: str, sums: SumRule) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules[collective] if SCHEDULES[collective][rule.schedule].sums >= sums)


def _when(rule: Rule) -> str:
    limits = [
        f"at most {_size(rule.max_bytes)}" if rule.max_bytes is not None else "",
        f"W at most {rule.max_world}" if rule.max_world is not None else "",
        f"(W-1) arrays at most {_size(rule.max_incast)}" if rule.max_incast is not None else "",
        {"any": "", "one_node": "on one node", "shared_nodes": "several nodes, some with several ranks"}[rule.where],
    ]
    return ", ".join(filter(None, limits)) or "else"


def _size(nbytes: int) -> str:
    return f"{nbytes // _KIB} KiB" if nbytes % _MIB else f"{nbytes // _MIB} MiB"


def nodes_of(peers: Sequence[Peer]) -> Nodes:
    """Returns the number of each member's node. A member that shares memory with no other has its own node."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(peer.node or f" {rank}", len(numbers)) for rank, peer in enumerate(peers))


_MOST_BYTES = 1 << 20
"""Largest file that is read; a table has a few hundred lines."""

_LIMITS = ("max_bytes", "max_world", "max_incast")


def load_rules(path: Path) -> Rules:
    """Reads the table in a file; a ValueError names the file and says what is wrong."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError("it is too long for a table")
        return parse_rules(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the table of schedules in {path} (PACELINE_TUNING) cannot be used: {error}") from None


def parse_rules(text: str) -> Rules:
    """Parses a table; a ValueError says what is wrong."""
    table = json.loads(text)
    given = table.get("rules") if isinstance(table, dict) else None
    if not isinstance(given, dict):
        raise ValueError('it is not of the form {"rules": {collective: [rule, ...]}}')
    rules = dict(RULES)
    for collective, of in given.items():
        if collective not in SCHEDULES or not isinstance(of, list) or not of:
            raise ValueError(f"{collective!r:.40} has no rules, or is not a collective")
        rules[collective] = tuple(_rule(collective, number, rule) for number, rule in enumerate(of, start=1))
    return rules


def dump_rules(rules: Rules = RULES) -> str:
    """Returns the table as the text of a file."""
    return json.dumps({"rules": {of: [_as_dict(rule) for rule in each] for of, each in rules.items()}}, indent=1)


def rules_digest(rules: Rules) -> str:
    """Returns a digest of a table, 16 hexadecimal digits; reasons do not count."""
    bare = {of: [rule._replace(reason="") for rule in each] for of, each in sorted(rules.items())}
    return hashlib.sha256(json.dumps(bare).encode()).hexdigest()[:16]


def _rule(collective: str, number: int, found: object) -> Rule:
    name = f"rule {number} of {collective}"
    if not isinstance(found, dict) or found.keys() - set(Rule._fields):
        raise ValueError(f"{name} must be an object that has no keys but {', '.join(Rule._fields)}")
    if found.get("schedule") not in list(SCHEDULES[collective]):  # a list: the value may be unhashable
        raise ValueError(f"{name}: there is no schedule {found.get('schedule')!r:.40}")
    for limit in _LIMITS:
        value = found.get(limit)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError(f"{name}: {limit} must be null or an integer of at least 0")
    if found.get("where", "any") not in get_args(Where) or not isinstance(found.get("reason", ""), str):
        raise ValueError(f"{name}: where must be one of {', '.join(get_args(Where))}, and reason a string")
    return Rule(**found)


def _as_dict(rule: Rule) -> Mapping[str, Any]:
    defaults = Rule(rule.schedule)._asdict()
    return {key: value for key, value in rule._asdict().items() if key == "schedule" or value != defaults[key]}
