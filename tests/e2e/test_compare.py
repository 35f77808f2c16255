"""`bench/compare.py` as a process: contenders in turns, with Gloo and Open MPI where there are both."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from jobs import COLLECTIVES
from peers import PEERS
from support.command import script, wait_until_gone
from support.peers import descendants, need_peers

pytestmark = pytest.mark.slow

COMPARE = Path(__file__).parents[2] / "bench" / "compare.py"

MANY_SIZES = ",".join(str(4 << n) for n in range(16))
"""So many that it cannot be through before a signal comes."""


def told(*arguments: str) -> dict[str, Any]:
    """What `compare.py ... --json` says."""
    with script(COMPARE, *arguments, "--seconds", "0.2", "--json") as running:
        assert running.wait() == 0, str(running)
    said: dict[str, Any] = json.loads(running.stdout.splitlines()[-1])
    for row in said["rows"]:
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p99_us"]
        assert row["collective"] in running.stderr  # people see it too
        assert row["impl"] in running.stderr
    return said


def test_links_take_turns_at_each_size() -> None:
    rows = told("all-gather", "--sizes", "8,1KiB", "-n", "2", "--links", "local,grpc")["rows"]
    assert [(row["bytes"], row["link"]) for row in rows] == [(8, "local"), (8, "grpc"), (1024, "local"), (1024, "grpc")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.sampled(3)
def test_a_signal_to_the_comparison_ends_all_processes(
    number: signal.Signals, code: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("t")  # a socket's path has 108 bytes at most
    arguments = ("all-reduce", "--sizes", MANY_SIZES, "-n", "2", "--links", "grpc")
    with script(COMPARE, *arguments, TMPDIR=str(folder)) as running:
        running.wait_for("4 B")  # all ranks are at work
        started = descendants(running.process.pid)
        assert len(started) >= 3  # their launcher, and they
        running.signal(number)
        assert running.wait() == code
    wait_until_gone(started, timeout=20)
    assert number == signal.SIGKILL or not list(folder.glob("paceline-bench-*"))


def test_a_killed_rank_ends_the_comparison() -> None:
    with script(COMPARE, "all-reduce", "--sizes", MANY_SIZES, "-n", "2", "--links", "grpc") as running:
        running.wait_for("4 B")
        ranks = [pid for pid in descendants(running.process.pid) if not descendants(pid)]
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        assert running.wait() == 128 + signal.SIGKILL
        assert "was killed by SIGKILL" in running.stderr
        assert "paceline over grpc: rank" in running.stderr


@pytest.mark.parametrize("impl", PEERS)
@pytest.mark.needs(what="peers")
def test_other_implementations_have_their_own_rows(impl: str) -> None:
    need_peers()
    rows = told("all", "--sizes", "1KiB", "-n", "3", "--links", "grpc", "--vs", impl)["rows"]
    assert [(row["collective"], row["impl"]) for row in rows] == [
        (name.replace("-", "_"), of) for name in COLLECTIVES for of in ("paceline", impl)
    ]
    for row in rows:
        assert row["link"] == {"paceline": "grpc", "gloo": "tcp", "openmpi": "shm"}[row["impl"]]


@pytest.mark.parametrize("place", ["in", "out"])
@pytest.mark.needs(what="peers")
def test_all_reduce_is_compared_in_place_and_out_of_place(place: str) -> None:
    """Results are checked in each."""
    need_peers()
    said = told("all-reduce", "--sizes", "1MiB", "--links", "shm", "--vs", "gloo,openmpi", "--place", place)
    impls = ["paceline", *(["gloo"] if place == "in" else []), "openmpi"]
    assert [row["impl"] for row in said["rows"]] == impls
    missing = [] if place == "in" else ["gloo cannot do all_reduce: torch.distributed sums in place only"]
    assert said.get("notes", []) == missing


@pytest.mark.needs(what="peers")
def test_all_implementations_run_together_and_are_plotted(tmp_path: Path) -> None:
    need_peers()
    file = tmp_path / "bandwidth.png"
    options = ("-n", "2", "--links", "local,grpc", "--vs", "gloo,openmpi", "--plot", str(file))
    rows = told("all-reduce", "--sizes", "1KiB,1MiB", *options)["rows"]
    assert [row["impl"] for row in rows] == ["paceline", "paceline", "gloo", "openmpi"] * 2
    assert file.read_bytes().startswith(b"\x89PNG")
