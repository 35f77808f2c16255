"""`paceline bench` and `paceline schedules` as processes: what they promise on the command line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline._collectives.choose import choose, load_rules
from paceline._collectives.schedules import SCHEDULES
from paceline.cli.bench.jobs import COLLECTIVES
from paceline.cli.bench.peers import PEERS
from support.command import command, wait_until_gone
from support.peers import descendants, need_peers

pytestmark = pytest.mark.slow

KEYS = {
    "collective",
    "impl",
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
        assert running.wait() == 0, str(running)
    said: dict[str, Any] = json.loads(running.stdout.splitlines()[-1])
    with_schedules = {"schedule"} if {"--schedule", "--tune"} & set(arguments) else set()
    for row in said["rows"]:
        assert set(row) == KEYS | with_schedules
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p99_us"]
        assert row["collective"] in running.stderr  # people see it too
        assert row["impl"] in running.stderr
    return said


def bench(*arguments: str) -> list[dict[str, Any]]:
    """Rows of Paceline alone, over the links that were asked for."""
    said = told(*arguments)
    assert set(said) == {"rows"}
    assert {row["impl"] for row in said["rows"]} == {"paceline"}
    rows: list[dict[str, Any]] = said["rows"]
    return rows


@pytest.mark.slow
def test_every_collective_has_a_row() -> None:
    rows = bench("all", "--sizes", "1KiB", "-n", "2", "--links", "local")
    assert [row["collective"] for row in rows] == [name.replace("-", "_") for name in COLLECTIVES]
    for row in rows:
        assert (row["link"], row["world_size"]) == ("local", 2)
        barrier = row["collective"] == "barrier"
        assert row["bytes"] == (0 if barrier else 1024)
        assert (row["busbw_GBps"] == 0) is barrier


def test_a_row_tells_the_size_that_was_measured() -> None:
    rows = bench("reduce-scatter", "--sizes", "4,1KiB", "-n", "3", "--links", "local")
    assert [row["bytes"] for row in rows] == [12, 1032]


@pytest.mark.parametrize(
    ("collective", "schedules"),
    [("all-reduce", "ring,star"), pytest.param("barrier", "ring,dissemination", marks=pytest.mark.exhaustive)],
)
@pytest.mark.slow
def test_schedules_turn_about_over_grpc(collective: str, schedules: str) -> None:
    rows = bench(collective, "--schedule", schedules, "--sizes", "1KiB", "-n", "2", "--links", "grpc")
    assert [row["schedule"] for row in rows] == schedules.split(",")
    for row in rows:
        assert (row["collective"], row["link"]) == (collective.replace("-", "_"), "grpc")


def test_links_take_turns() -> None:
    rows = bench("all-gather", "--sizes", "8,1KiB", "-n", "2", "--links", "local,grpc")
    assert [(row["bytes"], row["link"]) for row in rows] == [(8, "local"), (8, "grpc"), (1024, "local"), (1024, "grpc")]


@pytest.mark.parametrize("links", [pytest.param("local", marks=pytest.mark.exhaustive), "grpc"])
def test_arrays_of_the_group(links: str) -> None:
    rows = bench("all-reduce", "--sizes", "1KiB", "-n", "3", "--links", links, "--memory", "group")
    assert [(row["bytes"], row["link"]) for row in rows] == [(1024, links)]


def test_a_table_of_the_fastest(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    said = told("reduce", "--tune", "--tune-out", str(file), "--sizes", "8,1MiB", "-n", "2", "--links", "local")
    assert {(row["schedule"], row["bytes"]) for row in said["rows"]} == {
        (schedule, size) for schedule in SCHEDULES["reduce"] for size in (8, 1 << 20)
    }
    assert json.loads(file.read_text()) == {"rules": said["rules"]}
    fastest = min((row for row in said["rows"] if row["bytes"] == 1 << 20), key=lambda row: row["median_us"])
    assert choose("reduce", 1 << 20, 2, rules=load_rules(file)).schedule == fastest["schedule"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.sampled(3)
def test_nothing_outlives_the_bench(
    number: signal.Signals, code: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("t")  # a socket's path has 108 bytes at most
    arguments = ("bench", "all-reduce", "--sizes", MANY_SIZES, "-n", "2", "--links", "grpc")
    with command(*arguments, TMPDIR=str(folder)) as running:
        running.wait_for("4 B")  # all ranks are at work
        started = descendants(running.process.pid)
        assert len(started) >= 3  # their launcher, and they
        running.signal(number)
        assert running.wait() == code
    wait_until_gone(started, timeout=20)
    assert number == signal.SIGKILL or not list(folder.iterdir())


def test_a_rank_that_is_killed_ends_the_bench() -> None:
    with command("bench", "all-reduce", "--sizes", MANY_SIZES, "-n", "2", "--links", "grpc") as running:
        running.wait_for("4 B")
        ranks = [pid for pid in descendants(running.process.pid) if not descendants(pid)]
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        assert running.wait() == 128 + signal.SIGKILL
        assert "was killed by SIGKILL" in running.stderr
        assert "paceline over grpc: rank" in running.stderr


@pytest.mark.parametrize("impl", PEERS)
@pytest.mark.peers
def test_other_implementations_have_rows_of_their_own(impl: str) -> None:
    need_peers()
    rows = told("all", "--sizes", "1KiB", "-n", "3", "--links", "grpc", "--vs", impl)["rows"]
    assert [(row["collective"], row["impl"]) for row in rows] == [
        (name.replace("-", "_"), of) for name in COLLECTIVES for of in ("paceline", impl)
    ]
    for row in rows:
        assert row["link"] == {"paceline": "grpc", "gloo": "tcp", "openmpi": "shm"}[row["impl"]]


@pytest.mark.parametrize("place", ["in", "out"])
@pytest.mark.peers
def test_sums_in_place_and_into_another_array(place: str) -> None:
    """Results are checked in each."""
    need_peers()
    said = told("all-reduce", "--sizes", "1MiB", "--links", "shm", "--vs", "gloo,openmpi", "--place", place)
    impls = ["paceline", *(["gloo"] if place == "in" else []), "openmpi"]
    assert [row["impl"] for row in said["rows"]] == impls
    missing = [] if place == "in" else ["gloo cannot do all_reduce: torch.distributed sums in place only"]
    assert said.get("notes", []) == missing


@pytest.mark.peers
def test_all_of_them_in_one_run_and_a_picture(tmp_path: Path) -> None:
    need_peers()
    file = tmp_path / "bandwidth.png"
    options = ("-n", "2", "--links", "local,grpc", "--vs", "gloo,openmpi", "--plot", str(file))
    rows = told("all-reduce", "--sizes", "1KiB,1MiB", *options)["rows"]
    assert [row["impl"] for row in rows] == ["paceline", "paceline", "gloo", "openmpi"] * 2
    assert file.read_bytes().startswith(b"\x89PNG")


def test_schedules_json() -> None:
    with command("schedules", "all-reduce", "-n", "4", "--size", "16MiB", "--rank", "3", "--json") as running:
        assert running.wait() == 0, str(running)
    found = json.loads(running.stdout.splitlines()[-1])
    assert (found["collective"], found["world_size"], found["bytes"], found["rank"]) == ("all_reduce", 4, 16 << 20, 3)
    assert found["rows"]
