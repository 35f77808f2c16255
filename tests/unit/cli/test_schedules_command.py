"""`paceline schedules`: what is printed, and what is refused."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paceline._collectives.choose import RULES, Rule, choose, format_rules
from paceline._collectives.rows import format_schedule
from paceline._collectives.schedules import SCHEDULES, rows_of
from paceline.cli.app import app

runner = CliRunner()


def run(*arguments: str) -> str:
    result = runner.invoke(app, ["schedules", *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_the_table_of_choices() -> None:
    assert run() == format_rules() + "\n"
    rules = json.loads(run("--json"))["rules"]
    assert len(rules) == sum(len(of) for of in RULES.values())
    assert set(rules[0]) == {"collective", *Rule._fields}


def test_what_is_chosen_and_why_and_one_rank_s_rows() -> None:
    text = run("all-reduce", "-n", "4", "--size", "64KiB", "--rank", "2", "--schedule", "ring")
    chosen = choose("all_reduce", 64 << 10, 4)
    first, asked, also, empty, title, *rows = text.splitlines()
    assert first == f"all_reduce of 64 KiB among 4 ranks: {chosen.schedule} ({chosen.reason})"
    assert asked == "asked for: ring"
    assert also.startswith("there is also: ")
    assert "ring" not in also
    assert empty == ""
    assert title == "rank 2 by ring, 4 chunks of 16 KiB:"
    assert "\n".join(rows) == format_schedule(rows_of("all_reduce", "ring", 2, 4))


def test_a_size_that_has_no_equal_parts() -> None:
    assert "3 chunks of at most 36 B" in run("all-reduce", "-n", "3", "--size", "100", "--schedule", "ring")
    text = run("all-to-all", "-n", "3", "--size", "100")
    assert "all_to_all of 108 B among 3 ranks" in text
    assert "chunks of 36 B: it sends 0 to 2, and receives 3 to 5" in text


def test_a_root_and_ranks_that_do_nothing() -> None:
    assert "broadcast of 1 MiB from rank 0 among 4 ranks" in run("broadcast")
    assert "gather of 1 MiB to rank 0 among 1 rank:" in run("gather", "-n", "1")
    assert "nothing to send or receive" in run("gather", "-n", "1")
    assert run("barrier").startswith("barrier among 4 ranks: ")


def test_json() -> None:
    found = json.loads(run("reduce", "-n", "3", "--size", "1KiB", "--rank", "1", "--schedule", "tree", "--json"))
    row = {"step": 1, "send_to": 0, "send_chunk": 0, "recv_from": None, "recv_chunk": None, "action": None, "span": 1}
    assert found == {
        "collective": "reduce",
        "world_size": 3,
        "bytes": 1024,
        "schedule": "tree",
        "reason": "asked for",
        "chosen": choose("reduce", 1024, 3).schedule,
        "rank": 1,
        "chunks": 1,
        "rows": [row],
    }


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "schedule"), [(of, name) for of, names in SCHEDULES.items() for name in names])
@pytest.mark.parametrize("world", [1, 2, 7, 64])
def test_every_schedule_can_be_shown(collective: str, schedule: str, world: int) -> None:
    for rank in {0, world - 1}:
        text = run(collective.replace("_", "-"), "-n", str(world), "--rank", str(rank), "--schedule", schedule)
        assert f"rank {rank} by {schedule}" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all-to-none"], "choose one of all-reduce, reduce, reduce-scatter"),
        (["send-recv"], "there are no schedules of 'send-recv'"),
        (["all-reduce", "--schedule", "spiral"], "there are star, direct, ring"),
        (["all-reduce", "-n", "2", "--rank", "2"], "rank 2 lies outside the world of 2: choose one from 0 to 1"),
        (["all-reduce", "--rank", "-1"], "rank -1 lies outside the world of 4"),
        (["all-reduce", "--size", "6"], "is not a number of float32 elements"),
        (["--rank", "1"], "are about one collective: name one of all-reduce"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, ["schedules", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("paceline: ")
    assert result.stderr.count("\n") == 1
