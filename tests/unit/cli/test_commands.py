"""What the command line refuses, and how."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import re

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline_server.settings import ServerSettings
from pacelinepb import __version__, install_command

runner = CliRunner()


def test_version_option_prints_the_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.strip()) == (0, __version__)


def test_every_command_has_help() -> None:
    plain = ("coordinator", "certs", "run", "demo", "status", "drain", "restart", "bench", "debug", "version")
    for command in (*plain, "checkpoint"):
        for word in ("--help", "-h"):
            result = runner.invoke(app, [command, word])
            assert result.exit_code == 0
            assert "Usage" in result.stdout
    assert runner.invoke(app, ["-h"]).exit_code == 0
    assert runner.invoke(app, ["checkpoint", "inspect", "-h"]).exit_code == 0


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", [command.callback.__name__ for command in app.registered_commands])
def test_help_text_fills_the_terminal_width(command: str, width: int) -> None:
    shown = runner.invoke(app, [command, "--help"], env={"COLUMNS": str(width)}).stdout
    about = re.split(r"^[╭+]", shown, maxsplit=1, flags=re.MULTILINE)[0]
    for line, following in itertools.pairwise(line.strip() for line in about.splitlines()):
        assert not line or not following or len(line) + 1 + len(following.split()[0]) > width - 2, (line, following)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_completion_script(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = runner.invoke(app, ["--show-completion", shell], prog_name="paceline")
    assert result.exit_code == 0
    assert "_PACELINE_COMPLETE" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "-n", "2", "/no/such/script.py"], "there is no script /no/such/script.py"),
        (["run", "-n", "0", __file__], "-n must be 1 or more"),
        (["run", "-n", "2", "--min", "4", __file__], "give all of them the same coordinator"),
        (["run", "-n", "2", "--coordinator", "host:port", __file__], "not an address of the form host:port"),
        (["run", "-n", "2", "--restarts", "-1", __file__], "--restarts must be 0 or more, not -1"),
        (["run", "-n", "6", "--replica-size", "4", __file__], "-n 6 is no multiple of --replica-size 4"),
        (["run", "-n", "4", "--replica-size", "0", __file__], "--replica-size must be 1 or more, not 0"),
        (["run", "-n", "4", "--replica-size", "2", "--min", "3", __file__], "waits for replicas of other launchers"),
        (
            ["run", "-n", "4", "--replica-size", "2", "--restarts", "1", "--spares", "1", __file__],
            "--spares 1 does not go with --replica-size: a replica starts again as a whole",
        ),
        (["run", "--engine", "glue", __file__], "there is no engine 'glue' (--engine): the engines are links, gloo"),
        (["run", "-n", "2", "--advertise", "h:1", __file__], "--advertise h:1 names one port for 2 workers"),
        (["coordinator", "--restart-after", "0"], "--restart-after must be above 0, not 0"),
        (["coordinator", "--settle-time", "0"], "--settle-time must be above 0, not 0"),
        (["coordinator", "--max-silence", "0"], "--max-silence must be above 0, not 0"),
        (["coordinator", "--max-silence", "86401"], "max_silence must be at most 86400 s, a day, not 86401"),
        (["drain", "--coordinator", "host:1"], "name the job: paceline drain JOB RANK..., or paceline drain JOB --all"),
        (["drain", "--coordinator", "host:1", "digits"], "name the members of 'digits' to drain"),
        (["drain", "--coordinator", "host:1", "--all", "digits", "2"], "name members, or say --all, but not both"),
        (["status", "--watch", "--json"], "--watch and --json exclude each other"),
        (["run", "-r", "4", __file__], "-r/--redirects must be 0 (none), 1 (stdout)"),
        (["run", "--no-python", "-m", __file__], "give --no-python or --module, not both"),
        (["coordinator", "--listen", "host:99999"], "not an address of the form host:port"),
        (["status", "--coordinator", "::1:70"], "write an IPv6 address in brackets"),
        (["bench", "all-reduce", "--links", "grpc,rdma"], "there is no kind of link 'rdma'"),
        (["bench", "all-reduce", "--sizes", "3MiBs"], "is not a size"),
        (["bench", "all-to-none"], "choose one of all-reduce, reduce, reduce-scatter"),
    ],
)
def test_bad_arguments_print_one_line_and_exit_with_code_2(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, arguments, env={"PACELINE_COORDINATOR": None, "PACELINE_MIN_WORKERS": None})
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("paceline: ")
    assert result.stderr.count("\n") == 1


def test_coordinator_options_set_settle_time_and_max_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerSettings] = []
    monkeypatch.setattr(
        importlib.import_module("paceline_server.serving"), "serve", lambda settings, announce: served.append(settings)
    )
    monkeypatch.setattr(logging.getLogger("paceline_server.app"), "setLevel", lambda level: None)
    for arguments in ([], ["--settle-time", "7.5", "--max-silence", "60"]):
        assert runner.invoke(app, ["coordinator", *arguments]).exit_code == 0
    assert [(settings.settle_time, settings.max_silence) for settings in served] == [(0.2, 3_600.0), (7.5, 60.0)]


def test_an_unknown_command_exits_with_code_2() -> None:
    result = runner.invoke(app, ["ride"])
    assert result.exit_code == 2
    assert "No such command" in result.stderr


def test_demo_without_its_packages_prints_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 2
    assert install_command("demo") in result.stderr


def test_an_engine_without_its_package_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = runner.invoke(app, ["run", "--engine", "gloo", __file__])
    assert result.exit_code == 2
    assert "the engine gloo (--engine) needs torch, which is not installed: pip install torch" in result.stderr


@pytest.mark.parametrize(
    ("options", "variable", "value"),
    [(["--engine", "gloo"], "PACELINE_ENGINE", "gloo"), (["--drain-stragglers"], "PACELINE_DRAIN_STRAGGLERS", "1")],
    ids=["engine", "stragglers"],
)
def test_run_exports_options_to_workers(
    options: list[str], variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str | None] = []

    def look(*_: object, **__: object) -> int:
        found.append(os.environ.get(variable))
        return 0

    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("paceline.cli.run.run_workers", look)
    monkeypatch.setattr("paceline.cli.run.missing_package", lambda name: "")
    for arguments in (["run", *options, __file__], ["run", __file__]):
        assert runner.invoke(app, arguments).exit_code == 0
    assert found == [value, None]


def test_notice_variable_without_effect_under_mpi_prints_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NOTICE", "aws")
    monkeypatch.setattr("paceline_mpi._mpirun.become_mpirun", lambda *args, **options: None)
    monkeypatch.setattr("paceline.cli.run.run_workers", lambda *args, **options: 0)
    result = runner.invoke(app, ["run", "--engine", "mpi", "train.py"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert said == "paceline: PACELINE_NOTICE=aws has no effect with --engine mpi: no cloud is asked"
