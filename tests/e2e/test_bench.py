"""`paceline bench` and `paceline debug schedules` as processes: what they promise on the command line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline._collectives.choose import choose, load_rules
from paceline._collectives.schedules import SCHEDULES
from paceline.cli.bench import COLLECTIVES
from paceline.cli.sizes import bus_factor
from support.command import command, wait_until_gone
from support.peers import descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

KEYS = {
    "collective",
    "schedule",
    "link",
    "world_size",
    "bytes",
    "median_us",
    "p10_us",
    "p99_us",
    "busbw_GBps",
}

MANY_SIZES = ",".join(str(4 << n) for n in range(16))
"""So many that a bench cannot be through before a signal comes."""


def told(*arguments: str) -> dict[str, Any]:
    """What `paceline bench ... --json` says."""
    with command("bench", *arguments, "--seconds", "0.2", "--json") as running:
        assert running.wait(150.0) == 0, str(running)
    assert running.stdout.count("\n") == 1
    said: dict[str, Any] = json.loads(running.stdout)
    for row in said["rows"]:
        assert set(row) == KEYS
        assert row["collective"] in running.stderr  # people see it too
    return said


def test_every_collective_has_a_row() -> None:
    rows = told("all", "--sizes", "4,1KiB", "-n", "3", "--links", "grpc", "--memory", "group")["rows"]
    names = [name.replace("-", "_") for name in COLLECTIVES]
    assert [row["collective"] for row in rows] == [name for name in names for _ in range(1 if name == "barrier" else 2)]
    for row in rows:
        assert (row["link"], row["world_size"]) == ("grpc", 3)
        parted = row["collective"] in ("reduce_scatter", "scatter", "all_gather", "gather", "all_to_all")
        assert row["bytes"] in ([0] if row["collective"] == "barrier" else [12, 1032] if parted else [4, 1024])
        rate = row["bytes"] / row["median_us"] / 1e3 * bus_factor(row["collective"], 3)
        assert row["busbw_GBps"] == pytest.approx(rate, rel=0.05, abs=1e-4)


@pytest.mark.parametrize(
    ("collective", "schedules"),
    [("all-reduce", "ring,star"), pytest.param("barrier", "ring,dissemination", marks=pytest.mark.exhaustive)],
)
def test_each_schedule_has_a_row_for_each_kind_of_link(collective: str, schedules: str) -> None:
    rows = told(collective, "--schedule", schedules, "--sizes", "1KiB", "-n", "2", "--links", "shm,grpc")["rows"]
    assert [(row["link"], row["schedule"]) for row in rows] == [
        (link, schedule) for link in ("shm", "grpc") for schedule in schedules.split(",")
    ]


def test_tune_out_writes_rules_with_the_fastest_schedule(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    said = told("reduce", "--tune-out", str(file), "--sizes", "8,1MiB", "-n", "2")
    assert {(row["schedule"], row["bytes"]) for row in said["rows"]} == {
        (schedule, size) for schedule in SCHEDULES["reduce"] for size in (8, 1 << 20)
    }
    assert json.loads(file.read_text()) == {"rules": said["rules"]}
    fastest = min((row for row in said["rows"] if row["bytes"] == 1 << 20), key=lambda row: row["median_us"])
    assert choose("reduce", 1 << 20, 2, rules=load_rules(file), nodes=(0, 0)).schedule == fastest["schedule"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.sampled(3)
def test_a_signal_to_the_bench_ends_all_ranks(number: signal.Signals, code: int) -> None:
    with command("bench", "all-reduce", "--sizes", MANY_SIZES, "-n", "2", "--links", "grpc") as running:
        running.wait_for("4 B")  # all ranks are at work
        started = descendants(running.process.pid)
        assert len(started) >= 2
        running.signal(number)
        assert running.wait() == code
    wait_until_gone(started, timeout=20)


def test_a_killed_rank_ends_the_bench() -> None:
    with command("bench", "all-reduce", "--sizes", MANY_SIZES, "-n", "2", "--links", "grpc") as running:
        running.wait_for("4 B")
        ranks = descendants(running.process.pid)
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        assert running.wait() == 128 + signal.SIGKILL
        assert "was killed by SIGKILL" in running.stderr


def test_the_schedules_command_prints_json() -> None:
    with command("debug", "schedules", "all-reduce", "-n", "4", "--size", "16MiB", "--rank", "3", "--json") as running:
        assert running.wait(150.0) == 0, str(running)
    found = json.loads(running.stdout.splitlines()[-1])
    assert (found["collective"], found["world_size"], found["bytes"], found["rank"]) == ("all_reduce", 4, 16 << 20, 3)
    assert found["rows"]
