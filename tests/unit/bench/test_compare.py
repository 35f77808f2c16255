"""Rows become lines of pictures, and what people see."""

from __future__ import annotations

import io
import json

from rich.console import Console

from compare import Table, link_name
from conductor import Measured, Turn
from jobs import BenchRow, Job, make_row
from plot import lines_of


def row(collective: str, schedule: str | None, size: int, seconds: float, link: str = "shm") -> BenchRow:
    return make_row(collective, schedule, link, 4, size, [seconds])


def test_a_plot_has_a_line_for_each_implementation_and_link() -> None:
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


def test_a_row_shows_the_links_used_and_unexpected_ones_are_noted() -> None:
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


def test_link_name_lists_kinds_of_links_in_a_fixed_order() -> None:
    assert [link_name(kinds) for kinds in ((), ("grpc",), ("grpc", "tcp", "shm"))] == ["", "grpc", "shm+tcp+grpc"]


def test_a_row_as_dict_has_the_agreed_field_names() -> None:
    row = make_row("all_reduce", "ring", "grpc", 4, 1 << 20, [0.001 * n for n in range(1, 102)])
    assert json.loads(json.dumps(row.as_dict())) == {
        "collective": "all_reduce",
        "schedule": "ring",
        "impl": "paceline",
        "link": "grpc",
        "world_size": 4,
        "bytes": 1 << 20,
        "median_us": 51000.0,
        "p10_us": 11000.0,
        "p99_us": 100000.0,
        "busbw_GBps": round((1 << 20) / 0.051 * 1.5 / 1e9, 4),
    }
