"""Tables of schedules in files, and which nodes a rule is for."""

import json
from pathlib import Path

import pytest

from paceline._collectives.choose import (
    RULES,
    Rule,
    choose,
    dump_rules,
    load_rules,
    nodes_of,
    parse_rules,
    rules_digest,
    where_of,
)
from paceline._collectives.rows import SumRule
from paceline._links.base import Peer

MIB = 1 << 20


def test_nodes_are_numbered_in_rank_order_and_unnamed_ones_are_alone() -> None:
    peers = [Peer(rank, f"m{rank}", "h", node=node) for rank, node in enumerate(["b", "", "a", "b", "", "a"])]
    assert nodes_of(peers) == (0, 1, 2, 0, 3, 2)


@pytest.mark.parametrize(
    ("nodes", "where"),
    [((), "any"), ((0, 0), "one_node"), ((0,), "one_node"), ((0, 1, 2), "any"), ((0, 0, 1), "shared_nodes")],
)
def test_where_of_classifies_the_placement_of_ranks(nodes: tuple[int, ...], where: str) -> None:
    assert where_of(nodes) == where


def test_a_large_all_reduce_is_hierarchical_if_nodes_hold_several_ranks() -> None:
    assert choose("all_reduce", 4 * MIB, 4, nodes=(0, 0, 1, 1)).schedule == "hierarchical"
    assert choose("all_reduce", 4 * MIB, 4, nodes=(0, 1, 2, 3)).schedule == "direct"
    assert choose("all_reduce", 4 * MIB, 4, nodes=(0, 0, 0, 0)).schedule == "direct"
    assert choose("all_reduce", 64, 4, nodes=(0, 0, 1, 1)).schedule == "recursive_doubling"


def test_all_reduce_of_512_kib_on_one_node_uses_recursive_doubling() -> None:
    assert choose("all_reduce", MIB // 2, 2, nodes=(0, 0)).schedule == "recursive_doubling"
    assert choose("all_reduce", MIB, 2, nodes=(0, 1)).schedule == "direct"
    assert choose("all_reduce", MIB, 2, sums=SumRule.IN_RANK_ORDER, nodes=(0, 0)).schedule == "direct"


def test_a_dumped_table_loads_unchanged(tmp_path: Path) -> None:
    assert parse_rules(dump_rules()) == RULES
    mine = {**RULES, "barrier": (Rule("ring", None, 3, None, "few", "one_node"), Rule("dissemination"))}
    path = tmp_path / "table.json"
    path.write_text(dump_rules(mine))
    assert load_rules(path) == mine
    assert choose("barrier", 0, 2, rules=load_rules(path), nodes=(0, 0)).schedule == "ring"


def test_rules_digest_depends_on_rules_but_not_on_reasons() -> None:
    assert rules_digest(RULES) == rules_digest(parse_rules(dump_rules()))
    assert rules_digest({**RULES, "scatter": (Rule("direct", reason="other words"),)}) == rules_digest(RULES)
    assert rules_digest({**RULES, "barrier": (Rule("ring"),)}) != rules_digest(RULES)
    assert len(rules_digest(RULES)) == 16


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ([], "not of the form"),
        ({"rules": []}, "not of the form"),
        ({"rules": {"all_sing": []}}, "is not a collective"),
        ({"rules": {"barrier": []}}, "has no rules"),
        ({"rules": {"barrier": [{"schedule": "tree"}]}}, "rule 1 of barrier: there is no schedule 'tree'"),
        ({"rules": {"barrier": [{"schedule": "ring", "size": 1}]}}, "no keys but"),
        ({"rules": {"barrier": [{"schedule": "ring", "max_world": True}]}}, "max_world must be null or an integer"),
        ({"rules": {"barrier": [{"schedule": "ring", "max_bytes": -1}]}}, "max_bytes must be null or an integer"),
        ({"rules": {"barrier": [{"schedule": "ring", "where": "here"}]}}, "where must be one of any, one_node"),
        ({"rules": {"barrier": ["ring"]}}, "no keys but"),
    ],
)
def test_an_invalid_table_is_refused_with_a_reason(tmp_path: Path, table: object, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=rf"table\.json \(PACELINE_TUNING\) cannot be used: .*{text}"):
        load_rules(path)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b" " * (MIB + 1), b"[" * 100_000])
def test_an_unreadable_table_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"table\.json \(PACELINE_TUNING\) cannot be used"):
        load_rules(path)
