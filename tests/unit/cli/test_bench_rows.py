"""Rows become tables of rules, lines of pictures, and what people see."""

from __future__ import annotations

import io

from rich.console import Console

from paceline._collectives.choose import RULES, Rule, choose, dump_rules, parse_rules
from paceline.cli.bench.command import Table, link_name, tuned_rules
from paceline.cli.bench.jobs import BenchRow, Job, make_row
from paceline.cli.bench.measure import Measured, Turn
from paceline.cli.bench.plot import lines_of


def row(collective: str, schedule: str | None, size: int, seconds: float, link: str = "shm") -> BenchRow:
    return make_row(collective, schedule, link, 4, size, [seconds])


def test_the_fastest_schedule_at_each_size_becomes_a_rule() -> None:
    rows = [
        row("all_reduce", "ring", 1 << 20, 3.0),
        row("all_reduce", "ring", 4, 3.0),
        row("all_reduce", "ring", 1024, 3.0),
        row("all_reduce", "star", 4, 1.0),
        row("all_reduce", "star", 1024, 2.0),
        row("all_reduce", "star", 1 << 20, 4.0),
        row("send_recv", None, 4, 1.0),
    ]
    table = tuned_rules(rows)
    rules = table["all_reduce"]
    assert [(rule.schedule, rule.max_bytes, rule.max_world) for rule in rules[:2]] == [
        ("star", 1024, 4),
        ("ring", 1 << 20, 4),
    ]
    assert rules[2:] == RULES["all_reduce"]
    assert {name: table[name] for name in RULES if name != "all_reduce"} == {
        name: RULES[name] for name in RULES if name != "all_reduce"
    }
    for world, size, chosen in ((4, 1024, "star"), (3, 1025, "ring"), (2, 1 << 20, "ring")):
        assert choose("all_reduce", size, world, rules=table, nodes=(0,) * world).schedule == chosen
        assert choose("all_reduce", size, world, rules=table) == choose("all_reduce", size, world)
    for world, size in ((4, (1 << 20) + 1), (8, 4)):  # nobody has measured these
        nodes = (0,) * world
        assert choose("all_reduce", size, world, rules=table, nodes=nodes) == choose(
            "all_reduce", size, world, nodes=nodes
        )


def test_a_table_is_one_that_members_can_load() -> None:
    rules = tuned_rules([row("barrier", "ring", 0, 1e-6), row("reduce", "tree", 4, 1e-6, "grpc")])
    assert parse_rules(dump_rules(rules)) == rules
    assert rules["barrier"][0] == Rule("ring", 0, 4, reason="measured: 0 B in 1 us over shm, W=4", where="one_node")
    assert rules["reduce"][0].where == "any"


def test_a_picture_has_a_line_for_each_implementation_and_link() -> None:
    rows = [
        row("all_reduce", "ring", 6000, 1e-6),
        row("all_reduce", "ring", 4000, 1e-6),
        row("all_reduce", "star", 4000, 2e-6, "grpc"),
        row("barrier", "ring", 0, 1e-6),
    ]
    assert lines_of(rows, by_schedule=False) == {
        "all_reduce": {"paceline, shm": [(4000, 6.0), (6000, 9.0)], "paceline, grpc": [(4000, 3.0)]}
    }
    assert list(lines_of(rows, by_schedule=True)["all_reduce"]) == ["paceline, shm, ring", "paceline, grpc, star"]


class Somebody:
    impl, link, schedules = "paceline", "shm", True

    def prepare(self, job: Job) -> str | None:
        raise NotImplementedError

    def run(self, calls: int, schedule: str | None) -> Turn:
        raise NotImplementedError


def test_a_row_says_what_the_links_were_and_a_note_if_they_are_others_than_asked_for() -> None:
    out = io.StringIO()
    table = Table(Console(file=out, width=200), 2)
    job = Job("all_reduce", 1024)
    table.add(job, Measured(Somebody(), None, [Turn([0.001], 0.001, "ring", ("shm",))]))
    assert table.notes == []
    for _ in range(2):
        table.add(job, Measured(Somebody(), None, [Turn([0.001], 0.001, "ring", ("grpc", "shm"))]))
    table.add(job, Measured(Somebody(), None, lacks="there is no such thing"))
    assert [row.link for row in table.rows] == ["shm", "shm+grpc", "shm+grpc"]
    assert table.notes == [
        "paceline was asked to use shm links, but used shm+grpc",
        "paceline cannot do all_reduce: there is no such thing",
    ]
    for note in table.notes:
        assert out.getvalue().count(note) == 1


def test_kinds_of_links_in_order() -> None:
    assert [link_name(kinds) for kinds in ((), ("grpc",), ("grpc", "tcp", "shm"))] == ["", "grpc", "shm+tcp+grpc"]
