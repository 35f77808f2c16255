"""What the command line refuses, and how."""

from __future__ import annotations

import importlib
import logging

import pytest
from typer.testing import CliRunner

from paceline._version import __version__
from paceline.cli.app import app
from paceline_server.settings import ServerSettings

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.strip()) == (0, __version__)


def test_every_command_has_help() -> None:
    plain = ("coordinator", "certs", "run", "demo", "status", "drain", "restart", "forget", "bench", "schedules")
    for command in (*plain, "checkpoint"):
        assert runner.invoke(app, [command, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "-n", "2", "/no/such/script.py"], "there is no script /no/such/script.py"),
        (["run", "-n", "0", __file__], "-n must be 1 or more"),
        (["run", "-n", "2", "--min", "4", __file__], "give all of them one coordinator"),
        (["run", "-n", "2", "--coordinator", "host:port", __file__], "not an address of the form host:port"),
        (["run", "-n", "2", "--restarts", "-1", __file__], "--restarts must be 0 or more, not -1"),
        (["run", "-n", "2", "--advertise", "h:1", __file__], "--advertise h:1 names one port for 2 workers"),
        (["coordinator", "--restart-after", "0"], "--restart-after must be above 0, not 0"),
        (["coordinator", "--settle-time", "0"], "--settle-time must be above 0, not 0"),
        (["drain", "--coordinator", "host:1"], "name the members that shall leave (ranks or member ids), or say --all"),
        (["drain", "--coordinator", "host:1", "--all", "2"], "name members, or say --all, but not both"),
        (["coordinator", "--listen", "host:99999"], "not an address of the form host:port"),
        (["status", "--coordinator", "::1:70"], "write an IPv6 address in brackets"),
        (["bench", "all-reduce", "--links", "grpc,rdma"], "there is no link 'rdma'"),
        (["bench", "all-reduce", "--sizes", "3MiBs"], "is not a size"),
        (["bench", "all-to-none"], "choose one of all-reduce, reduce, reduce-scatter"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, arguments, env={"PACELINE_COORDINATOR": None, "PACELINE_MIN_WORKERS": None})
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("paceline: ")
    assert result.stderr.count("\n") == 1


def test_a_coordinator_is_told_how_long_to_wait_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerSettings] = []
    monkeypatch.setattr(
        importlib.import_module("paceline_server.app"), "serve", lambda settings, announce: served.append(settings)
    )
    monkeypatch.setattr(logging.getLogger("paceline_server.app"), "setLevel", lambda level: None)
    for arguments in ([], ["--settle-time", "7.5"]):
        assert runner.invoke(app, ["coordinator", *arguments]).exit_code == 0
    assert [settings.settle_time for settings in served] == [0.2, 7.5]


def test_an_unknown_command() -> None:
    result = runner.invoke(app, ["ride"])
    assert result.exit_code == 2
    assert "No such command" in result.stderr


def test_the_demo_says_how_to_get_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "pip install 'paceline[demo]'" in result.stderr
