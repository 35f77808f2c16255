"""`paceline bench` and `paceline schedules` as processes: what they promise on the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.cli.bench.plan import COLLECTIVES
from support.command import command

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


def bench(*arguments: str) -> list[dict[str, Any]]:
    """The rows of `paceline bench ... --json`."""
    with command("bench", *arguments, "--json") as running:
        assert running.wait() == 0, str(running)
    rows: list[dict[str, Any]] = json.loads(running.stdout.splitlines()[-1])["rows"]
    for row in rows:
        assert set(row) == KEYS | ({"schedule"} if "--schedule" in arguments else set())
        assert row["impl"] == "paceline"
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p99_us"]
        assert row["collective"] in running.stderr  # people see it too
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


@pytest.mark.parametrize(("collective", "schedules"), [("all-reduce", "ring,star"), ("barrier", "ring,dissemination")])
@pytest.mark.slow
def test_schedules_turn_about_over_grpc(collective: str, schedules: str) -> None:
    rows = bench(collective, "--schedule", schedules, "--sizes", "1KiB", "-n", "2", "--links", "grpc")
    assert [row["schedule"] for row in rows] == schedules.split(",")
    for row in rows:
        assert (row["collective"], row["link"]) == (collective.replace("-", "_"), "grpc")


def test_schedules_json() -> None:
    with command("schedules", "all-reduce", "-n", "4", "--size", "16MiB", "--rank", "3", "--json") as running:
        assert running.wait() == 0, str(running)
    found = json.loads(running.stdout.splitlines()[-1])
    assert (found["collective"], found["world_size"], found["bytes"], found["rank"]) == ("all_reduce", 4, 16 << 20, 3)
    assert found["rows"]
