"""Tables of rules in files: what `paceline bench --tune` finds out on a machine, for all members of a job there.

The table is JSON: {"rules": {collective: [rule, ...]}}, a rule as `choose.Rule` has it. A collective that it leaves out
goes by the rules that Paceline comes with. Members of one job must have the same table: its digest is one of the
settings on which they agree, so that all ranks of a view choose alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from paceline.collectives.choose import RULES, Rule, Rules, Where
from paceline.collectives.programs import SCHEDULES

__all__ = ["digest", "dump_rules", "load_rules", "parse_rules"]

_MOST_BYTES = 1 << 20
"""Of a file; a table has some hundred lines."""

_LIMITS = ("max_bytes", "max_world", "max_incast")


def load_rules(path: Path) -> Rules:
    """The table in a file.

    Raises:
        ValueError: the file cannot be read, or holds no table; the text names it and says what is wrong.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError("it is longer than any table")
        return parse_rules(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the table of schedules in {path} (PACELINE_TUNING) cannot be used: {error}") from None


def parse_rules(text: str) -> Rules:
    """The table that a text holds.

    Raises:
        ValueError: it holds none; the text says what is wrong.
    """
    table = json.loads(text)
    given = table.get("rules") if isinstance(table, dict) else None
    if not isinstance(given, dict):
        raise ValueError('it is not of the form {"rules": {collective: [rule, ...]}}')
    rules = dict(RULES)
    for collective, of in given.items():
        if collective not in SCHEDULES or not isinstance(of, list) or not of:
            raise ValueError(f"no rules, or no collective: {collective!r:.40}")
        rules[collective] = tuple(_rule(collective, number, rule) for number, rule in enumerate(of, start=1))
    return rules


def dump_rules(rules: Rules = RULES) -> str:
    """The table as a file has it."""
    return json.dumps({"rules": {of: [_as_dict(rule) for rule in each] for of, each in rules.items()}}, indent=1)


def digest(rules: Rules) -> str:
    """16 hexadecimal digits for what a table says; reasons do not count."""
    bare = {of: [rule._replace(reason="") for rule in each] for of, each in sorted(rules.items())}
    return hashlib.sha256(json.dumps(bare).encode()).hexdigest()[:16]


def _rule(collective: str, number: int, found: object) -> Rule:
    name = f"rule {number} of {collective}"
    if not isinstance(found, dict) or found.keys() - set(Rule._fields):
        raise ValueError(f"{name} has something else than {', '.join(Rule._fields)}")
    if found.get("schedule") not in list(SCHEDULES[collective]):  # it may be anything, and what is no text has no hash
        raise ValueError(f"{name}: there is no schedule {found.get('schedule')!r:.40}")
    for limit in _LIMITS:
        value = found.get(limit)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError(f"{name}: {limit} must be a number from 0, or null")
    if found.get("where", "any") not in get_args(Where) or not isinstance(found.get("reason", ""), str):
        raise ValueError(f"{name}: where is one of {', '.join(get_args(Where))}, and reason a text")
    return Rule(**found)


def _as_dict(rule: Rule) -> Mapping[str, Any]:
    defaults = Rule(rule.schedule)._asdict()
    return {key: value for key, value in rule._asdict().items() if key == "schedule" or value != defaults[key]}
