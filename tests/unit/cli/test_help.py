"""The help of all commands, and how options are read that they have in common."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from paceline.cli import options
from paceline.cli.app import app
from paceline.cli.commands import with_http
from pacelinepb.v1.admin_pb2 import JobSummary

runner = CliRunner()


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command, groups too."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


ALL = list(commands(typer.main.get_command(app)))

ARGUMENT = re.compile(r"│ [ *] +[a-z]+ +TEXT ")
"""An argument as typer before 0.26 shows it: by its name, with a type, although it has a metavar."""


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_shows_no_names_of_types(words: tuple[str, ...]) -> None:
    shown = runner.invoke(app, [*words, "--help"], env={"COLUMNS": "120", "TERMINAL_WIDTH": "120"}).stdout
    shown = ARGUMENT.sub("", shown)
    assert "Usage" in shown
    assert not re.search(r"<(bool|int|str|float|path|list)|INTEGER|TEXT|FLOAT|BOOLEAN", shown), shown


def test_the_usage_of_run_is_as_it_is_typed() -> None:
    assert "paceline run [OPTIONS] SCRIPT [ARGS]...\n" in re.sub(
        " +\n", "\n", runner.invoke(app, ["run", "--help"], prog_name="paceline").stdout
    )


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["--http", "train.py"], ["--http=", "train.py"]),
        (["--http", "-n", "2", "train.py"], ["--http=", "-n", "2", "train.py"]),
        (["-n", "2", "--http"], ["-n", "2", "--http="]),
        (["--http", "8080", "train.py"], ["--http", "8080", "train.py"]),
        (["--http", "0.0.0.0:8080"], ["--http", "0.0.0.0:8080"]),
        (["--http", "[::1]:8080"], ["--http", "[::1]:8080"]),
        (["--http", "localhost", "train.py"], ["--http", "localhost", "train.py"]),
        (["--http", "0.0.0.0", "train.py"], ["--http", "0.0.0.0", "train.py"]),
        (["-mn", "2", "--http", "train"], ["-mn", "2", "--http=", "train"]),
        (["--http=host", "train.py"], ["--http=host", "train.py"]),
        (["-n", "2", "train.py", "--http", "x"], ["-n", "2", "train.py", "--http", "x"]),  # the script's
        (["--", "--http", "x"], ["--", "--http", "x"]),
    ],
    ids=" ".join,
)
def test_http_may_stand_alone(typed: list[str], read: list[str]) -> None:
    assert with_http(typed, {"-n", "--http"}) == read


@pytest.mark.parametrize(
    ("old", "new"),
    [("flight", "debug flight"), ("schedules", "debug schedules"), ("forget", "restart --forget")],
)
def test_a_command_of_the_last_release_says_what_it_is_called_now(old: str, new: str) -> None:
    result = runner.invoke(app, [old, "digits"])
    assert result.exit_code == 2
    assert result.stderr == f"paceline: paceline {old} is now called paceline {new}\n"


def test_a_job_is_not_declared_dead_and_forgotten_at_once() -> None:
    result = runner.invoke(app, ["restart", "digits", "--force", "--forget"])
    assert result.exit_code == 2
    assert result.stderr.startswith("paceline: give --force or --forget, not both")


def test_version_shows_packages_and_the_protocol() -> None:
    shown = runner.invoke(app, ["version"]).stdout.split()
    assert {"paceline", "protocol", "python", "grpcio"} <= set(shown)


def test_a_shell_completes_names_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def listed(address: str, timeout: float) -> list[JobSummary]:
        asked.append(address)
        return [JobSummary(name=name) for name in ("digits", "dogs", "cats")]

    monkeypatch.setattr("paceline.cli.admin.list_jobs", listed)
    typed = {
        "_PACELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": "paceline status --coordinator h:1 d",
        "COMP_CWORD": "4",
    }
    assert runner.invoke(app, [], prog_name="paceline", env=typed).stdout.split() == ["digits", "dogs"]
    assert asked == ["h:1"]


def test_a_shell_gets_no_names_and_no_error_where_no_coordinator_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "_COMPLETION_S", 0.1)
    typed = {
        "_PACELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": "paceline drain --coordinator 127.0.0.1:1 ",
        "COMP_CWORD": "4",
    }
    assert runner.invoke(app, [], prog_name="paceline", env=typed).output.strip() == ""
