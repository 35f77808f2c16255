"""`paceline bench`: what it measures, which rows its ranks report, and the table of rules that follows from rows."""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline import Group
from paceline._collectives.choose import RULES, Rule, choose, dump_rules, only, parse_rules
from paceline._collectives.schedules import SCHEDULES
from paceline.cli import bench_rank
from paceline.cli.app import app
from paceline.cli.bench import COLLECTIVES, RowConsole, plan_jobs, plan_links, tuned_rules
from paceline.cli.bench_rank import make_call, measure
from paceline.testing import run_ranks

NAMES = [name.replace("-", "_") for name in COLLECTIVES]


def test_plan_jobs_rounds_each_size_up_to_the_measured_size() -> None:
    assert plan_jobs("all-gather", 3, "4,8,1KiB", None) == [("all_gather", 12, [None]), ("all_gather", 1032, [None])]
    assert plan_jobs("barrier", 3, "4,1KiB", None) == [("barrier", 0, [None])]
    assert [(name, size) for name, size, _ in plan_jobs("all", 2, "1KiB", None)] == [
        (name, 0 if name == "barrier" else 1024) for name in NAMES
    ]


def test_duplicate_schedules_are_dropped_and_keep_the_given_order() -> None:
    assert plan_jobs("all-reduce", 2, "4", "ring, star,ring") == [("all_reduce", 4, ["ring", "star"])]
    assert {name: schedules for name, _, schedules in plan_jobs("all", 2, "4", "all")} == {
        name: list(schedules) for name, schedules in SCHEDULES.items()
    }


def test_plan_links_keeps_the_given_order() -> None:
    assert plan_links("grpc, shm", None) == ["grpc", "shm"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all-to-none"], "choose one of all-reduce, reduce, reduce-scatter, broadcast, scatter, all-gather, gather"),
        (["--links", "grpc,rdma"], "there is no kind of link 'rdma': choose from shm, tcp, grpc"),
        (["--links", "grpc,"], "there is no kind of link ''"),
        (["--memory", "mine"], "--memory must be one of any, group, not 'mine'"),
        (["--tune-out", "/no/such/folder/a.json"], "there is no folder /no/such/folder for --tune-out"),
        (["--tune-out", "a.json", "--links", "shm,grpc"], "--tune-out is for one kind of link"),
        (["send-recv", "--tune-out", "a.json"], "send-recv has no schedules"),
        (["all", "--sizes", "3MiBs"], "is not a size"),
        (["send-recv", "--schedule", "all"], "send-recv has no schedules"),
        (["send-recv", "--schedule", "ring"], "send-recv has no schedules"),
        (["all", "--schedule", "bruck"], "there is no schedule 'bruck' for all_reduce"),
        (
            ["all-gather", "--schedule", "ring,star"],
            "no schedule 'star' for all_gather; the schedules are direct, bruck",
        ),
    ],
)
def test_bad_bench_arguments_print_one_line_and_exit_with_code_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.startswith("paceline: ")
    assert result.stderr.count("\n") == 1


def test_help_names_all_collectives() -> None:
    shown = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"}).stdout
    assert not [name for name in COLLECTIVES if name not in shown]


class Recorder:
    """A group that notes what is called."""

    rank, size = 0, 3

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        def call(x: Any = None, *args: Any, root: int = 0, out: Any = None, op: str = "") -> Any:
            if op != "max":
                self.calls.append(
                    (name, np.size(x) if isinstance(x, np.ndarray) else 0, np.size(out) if out is not None else 0)
                )
            return x

        return call


@pytest.mark.parametrize(
    ("collective", "sizes"),
    [
        ("all_reduce", [("all_reduce", 6, 6)]),
        ("reduce", [("reduce", 6, 6)]),
        ("reduce_scatter", [("reduce_scatter", 6, 2)]),
        ("broadcast", [("broadcast", 6, 6)]),
        ("scatter", [("scatter", 6, 2)]),
        ("all_gather", [("all_gather", 2, 6)]),
        ("gather", [("gather", 2, 6)]),
        ("all_to_all", [("all_to_all", 6, 6)]),
        ("send_recv", [("send", 6, 0), ("recv", 0, 6)]),
        ("barrier", [("barrier", 0, 0)]),
    ],
)
def test_make_call_runs_the_collective_on_arrays_of_the_given_size(
    collective: str, sizes: list[tuple[str, int, int]]
) -> None:
    group = Recorder()
    make_call(group, collective, 6 * 4)()  # type: ignore[arg-type]
    assert group.calls == sizes


@pytest.mark.parametrize("memory", ["any", "group"])
@pytest.mark.parametrize("collective", NAMES)
def test_each_collective_can_be_measured(collective: str, memory: str) -> None:
    size = 0 if collective == "barrier" else 24

    def rank(group: Group) -> dict[str, Any]:
        (row,) = measure(group, collective, size, [None], memory, 1e-9)
        return row

    for row in run_ranks(3, rank):
        assert list(row) == [
            "collective", "schedule", "link", "world_size", "bytes", "median_us", "p10_us", "p99_us", "busbw_GBps",
        ]  # fmt: skip
        assert (row["collective"], row["link"], row["world_size"], row["bytes"]) == (collective, "local", 3, size)
        assert row["schedule"] == (choose(collective, size, 3).schedule if collective in SCHEDULES else None)
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p99_us"]


def test_schedules_are_measured_alternately(monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[str] = []

    def noted(collective: str, schedule: str) -> Any:
        forced.append(schedule)
        return only(collective, schedule)

    def rank(group: Group) -> tuple[list[str], str]:
        rows = list(measure(group, "all_reduce", 24, ["ring", "star"], "any", 1e-9))
        return [row["schedule"] for row in rows], group._core.choose("all_reduce", 24, 1).schedule

    monkeypatch.setattr(bench_rank, "only", noted)
    assert run_ranks(1, rank) == [(["ring", "star"], choose("all_reduce", 24, 1).schedule)]
    assert forced == ["ring", "star"] * 11  # once to estimate, then in ten turns


@pytest.mark.parametrize(("collective", "barriers"), [("all_reduce", 2), ("broadcast", 2 + 4 + 10)])
def test_barrier_precedes_each_call_of_a_non_synchronizing_collective(collective: str, barriers: int) -> None:
    def rank(group: Group) -> int:
        waits = []
        group.barrier = lambda **_: waits.append(1)  # type: ignore[method-assign]
        list(measure(group, collective, 24, [None], "any", 1e-9))  # four calls to estimate, then ten
        return len(waits)

    assert run_ranks(1, rank) == [barriers]


def test_a_call_is_timed_by_its_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(threading.local):
        now = 0.0

        def perf_counter(self) -> float:
            self.now += 1.0 if threading.current_thread().name == "rank-0" else 3.0
            return self.now

    monkeypatch.setattr(bench_rank, "time", Clock())
    rows = run_ranks(2, lambda group: next(measure(group, "all_reduce", 24, [None], "any", 1e-9)))
    assert [row["median_us"] for row in rows] == [3e6, 3e6]


def row(collective: str, schedule: str | None, size: int, median_us: float, link: str = "shm") -> dict[str, Any]:
    facts = {"collective": collective, "schedule": schedule, "link": link, "world_size": 4, "bytes": size}
    return facts | {"median_us": median_us, "p10_us": 1.0, "p99_us": 9.0, "busbw_GBps": 0.1}


def test_row_console_keeps_rows_and_prints_them_below_a_header() -> None:
    out = io.StringIO()
    console = RowConsole(out)
    console.record(None, {"kind": "row", **row("all_reduce", "ring", 1 << 20, 12.5)})  # type: ignore[arg-type]
    console.record(None, {"kind": "row", **row("send_recv", None, 4, 1.5)})  # type: ignore[arg-type]
    console.close()
    assert console.rows == [row("all_reduce", "ring", 1 << 20, 12.5), row("send_recv", None, 4, 1.5)]
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["collective", "schedule", "link", "W", "size", "median", "us", "p10", "us", "p99", "us", "bus", "GB/s"],
        ["all_reduce", "ring", "shm", "4", "1", "MiB", "12.5", "1.0", "9.0", "0.1"],
        ["send_recv", "-", "shm", "4", "4", "B", "1.5", "1.0", "9.0", "0.1"],
    ]


def test_the_fastest_schedule_at_each_size_becomes_a_rule() -> None:
    rows = [
        row("all_reduce", "ring", 1 << 20, 3e6),
        row("all_reduce", "ring", 4, 3e6),
        row("all_reduce", "ring", 1024, 3e6),
        row("all_reduce", "star", 4, 1e6),
        row("all_reduce", "star", 1024, 2e6),
        row("all_reduce", "star", 1 << 20, 4e6),
        row("send_recv", None, 4, 1e6),
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


def test_tuned_rules_survive_dump_and_parse() -> None:
    rules = tuned_rules([row("barrier", "ring", 0, 1.0), row("reduce", "tree", 4, 1.0, "grpc")])
    assert parse_rules(dump_rules(rules)) == rules
    assert rules["barrier"][0] == Rule("ring", 0, 4, reason="measured: 0 B in 1 us over shm, W=4", where="one_node")
    assert rules["reduce"][0].where == "any"
