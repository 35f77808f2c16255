"""What the command line of `paceline bench` asks for, and what it refuses."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.cli.bench.plan import COLLECTIVES, Job, plan
from paceline.collectives.programs import SCHEDULES

runner = CliRunner()


def test_every_collective_that_has_schedules_can_be_measured() -> None:
    assert {name.replace("-", "_") for name in COLLECTIVES} == {*SCHEDULES, "send_recv"}


def test_a_job_for_each_size_as_it_can_be() -> None:
    assert plan("all-gather", 3, "4,1KiB") == [Job("all_gather", 12), Job("all_gather", 1032)]
    assert plan("barrier", 3, "4,1KiB") == [Job("barrier", 0)]


def test_all_of_them() -> None:
    jobs = plan("all", 2, "1KiB")
    assert [job.collective for job in jobs] == [name.replace("-", "_") for name in COLLECTIVES]
    assert [job.bytes for job in jobs] == [1024] * (len(jobs) - 1) + [0]


def test_schedules_once_each_in_the_order_they_are_named() -> None:
    assert plan("all-reduce", 2, "4", "ring, star,ring") == [Job("all_reduce", 4, ("ring", "star"))]


@pytest.mark.parametrize("job", [Job("send_recv", 4), Job("barrier", 0, ("ring",)), Job("reduce", 8, ("star", "tree"))])
def test_a_job_travels_as_an_argument(job: Job) -> None:
    assert Job.from_argument(job.to_argument()) == job


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all-to-none"], "choose one of all-reduce, reduce, reduce-scatter, broadcast, scatter, all-gather, gather"),
        (["all-reduce", "--links", "shm"], "there is no link 'shm'"),
        (["all", "--sizes", "3MiBs"], "is not a size"),
        (["all", "--sizes", "4", "--schedule", "ring"], "--schedule is for one collective"),
        (["send-recv", "--schedule", "ring"], "send-recv has no schedules"),
        (["all-gather", "--schedule", "ring,star"], "no schedule 'star' for all_gather: there are direct, bruck, ring"),
        (["all-reduce", "--schedule", ""], "there is no schedule '' for all_reduce: there are star, direct, ring"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("paceline: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_help_names_all_collectives() -> None:
    result = runner.invoke(app, ["bench", "--help"], env={"COLUMNS": "200"})
    for collective in COLLECTIVES:
        assert collective in result.stdout
