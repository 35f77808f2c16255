"""A table of rules (`collectives.choose`) from what was measured. Pure.

Rules hold up to the world size that was measured, and up to the largest size at which a schedule was the fastest. What
was not measured stays as it is in the table that there is: larger worlds, larger arrays, and other collectives.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from paceline.cli.bench.arithmetic import Row
from paceline.collectives.choose import RULES, Rule, Rules

__all__ = ["tuned_rules"]


def tuned_rules(rows: Iterable[Row], table: Rules = RULES) -> Rules:
    """The table with the fastest schedule for each collective and size before its own rules.

    Args:
        rows: of one world size and one kind of link, each schedule at each size.
        table: the rules for all else.
    """
    best: dict[tuple[str, int], Row] = {}
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


def _rule(row: Row) -> Rule:
    """From the last of those sizes, one after the other, at which one schedule was the fastest."""
    assert row.schedule is not None
    return Rule(
        row.schedule,
        row.bytes,
        row.world_size,
        reason=f"measured: {row.bytes} B in {row.median_us:.0f} us over {row.link}, W={row.world_size}",
        # What is fast in shared memory says nothing of ranks that have a network between them.
        where="one_node" if row.link == "shm" else "any",
    )
