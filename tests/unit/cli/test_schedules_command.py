"""`paceline debug schedules`: what is printed, and what is refused."""

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
    result = runner.invoke(app, ["debug", "schedules", *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_schedules_without_arguments_prints_the_rule_table() -> None:
    assert run() == format_rules() + "\n"
    rules = json.loads(run("--json"))["rules"]
    assert len(rules) == sum(len(of) for of in RULES.values())
    assert set(rules[0]) == {"collective", *Rule._fields}


def test_output_shows_the_choice_its_reason_and_one_rank_s_rows() -> None:
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


def test_a_size_without_equal_parts_is_rounded_up() -> None:
    assert "3 chunks of at most 36 B" in run("all-reduce", "-n", "3", "--size", "100", "--schedule", "ring")
    text = run("all-to-all", "-n", "3", "--size", "100")
    assert "all_to_all of 108 B among 3 ranks" in text
    assert "chunks of 36 B: it sends 0 to 2, and receives 3 to 5" in text


def test_output_names_the_root_and_ranks_that_send_nothing() -> None:
    assert "broadcast of 1 MiB from rank 0 among 4 ranks" in run("broadcast")
    assert "gather of 1 MiB to rank 0 among 1 rank:" in run("gather", "-n", "1")
    assert "nothing to send or receive" in run("gather", "-n", "1")
    assert run("barrier").startswith("barrier among 4 ranks: ")


def test_microbatches_option_shows_the_sums_of_each_rank() -> None:
    text = run("all-reduce", "-n", "3", "--microbatches", "8", "--size", "8MiB")
    assert "all_reduce of 8 MiB among 3 ranks: direct" in text
    assert "each chunk is summed in a tree over 8 microbatches" in text
    assert "rank 0: 1 array a frame, the sum of 0-1" in text
    assert "rank 1: 2 arrays a frame, the sums of 2-3, 4-4" in text
    assert "rank 2: 2 arrays a frame, the sums of 5-5, 6-7" in text
    found = json.loads(run("all-reduce", "-n", "2", "--microbatches", "8", "--json"))
    assert found["subtrees"] == [[[0, 4]], [[4, 8]]]
    for arguments, words in (
        (("broadcast", "--microbatches", "8"), "--microbatches is for all-reduce"),
        (("all-reduce", "-n", "9", "--microbatches", "8"), "not 8 for 9 ranks"),
        (
            ("all-reduce", "--microbatches", "8", "--schedule", "ring"),
            "ring does not sum an element at one rank",
        ),
    ):
        result = runner.invoke(app, ["debug", "schedules", *arguments])
        assert result.exit_code == 2
        assert words in result.stderr.replace("\n", " ")


def test_json_output_of_one_rank_s_rows() -> None:
    found = json.loads(run("reduce", "-n", "3", "--size", "1KiB", "--rank", "1", "--schedule", "tree", "--json"))
    row = {"step": 1, "send_to": 0, "send_chunk": 0, "recv_from": None, "recv_chunk": None, "action": None, "span": 1}
    assert found == {
        "collective": "reduce",
        "world_size": 3,
        "bytes": 1024,
        "schedule": "tree",
        "reason": "asked for",
        "chosen": choose("reduce", 1024, 3).schedule,
        "nodes": [],
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
        (["all-reduce", "--schedule", "spiral"], "the schedules are star, direct, ring"),
        (["all-reduce", "-n", "2", "--rank", "2"], "rank 2 lies outside the world of 2: choose one from 0 to 1"),
        (["all-reduce", "--rank", "-1"], "rank -1 lies outside the world of 4"),
        (["all-reduce", "--size", "6"], "is not a whole number of float32 elements"),
        (["--rank", "1"], "need a collective: name one of all-reduce"),
    ],
)
def test_bad_arguments_print_one_line_and_exit_with_code_2(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, ["debug", "schedules", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("paceline: ")
    assert result.stderr.count("\n") == 1


def test_hosts_option_changes_the_choice_and_the_rows() -> None:
    nodes = (0, 0, 0, 0, 1, 1, 1, 1)
    first, *rest = run("all-reduce", "-n", "8", "--hosts", "2", "--size", "16M", "--rank", "5").splitlines()
    assert first.startswith(
        "all_reduce of 16 MiB among 8 ranks on 2 hosts (rank 5's has ranks 4 to 7): hierarchical (one sum per node"
    )
    assert "\n".join(rest).endswith(format_schedule(rows_of("all_reduce", "hierarchical", 5, 8, nodes=nodes)))
    found = json.loads(run("all-reduce", "-n", "8", "--hosts", "2", "--size", "16M", "--json"))
    assert (found["chosen"], found["chunks"], found["nodes"]) == ("hierarchical", 8, list(nodes))
    assert "hierarchical (" not in run("all-reduce", "-n", "8", "--size", "16M")
    assert "8 ranks on 1 host: direct (" in run("all-reduce", "-n", "8", "--hosts", "1", "--size", "16M")
    assert "star (all but one rank wait once" in run("barrier", "-n", "8", "--hosts", "1")


def test_ranks_are_spread_almost_evenly_over_hosts() -> None:
    assert json.loads(run("barrier", "-n", "5", "--hosts", "2", "--json"))["nodes"] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("hosts", ["0", "5"])
def test_hosts_option_outside_the_number_of_ranks_is_refused(hosts: str) -> None:
    result = runner.invoke(app, ["debug", "schedules", "all-reduce", "-n", "4", "--hosts", hosts])
    assert result.exit_code == 2
    assert result.stderr == f"paceline: --hosts must be 1 to 4, the number of ranks, not {hosts}\n"
