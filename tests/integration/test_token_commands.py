"""Tokens on the command line: what is said where they cannot be used, and that none of them is ever printed."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.cli.health import trouble_at
from paceline.testing import coordinator
from paceline_server.__main__ import main as serve_alone
from support.command import command

ALL, TWO = "the-token-for-all-0123456789", "the-token-for-two-0123456789"


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        ((), {"PACELINE_TOKEN": ""}, "PACELINE_TOKEN is set, but empty"),
        ((), {"PACELINE_TOKEN_FILE": ""}, "PACELINE_TOKEN_FILE is set, but empty"),
        ((), {"PACELINE_TOKEN": "short"}, "the token has 5 characters, but needs at least 16"),
        ((), {"PACELINE_TOKEN_FILE": "/no/such/file"}, "cannot read the token file /no/such/file"),
        (("--token-file", "/no/such/file"), {}, "cannot read the token file /no/such/file"),
        (("--restart-after", "0"), {}, "must be above 0, not 0"),
        (("--settle-time", "0"), {}, "must be above 0, not 0"),
        (("--tls-cert", "/no/such/cert"), {}, "tls_cert and tls_key go together"),
        (("--tls-cert", "/no/such/cert", "--tls-key", "/no/key"), {}, "cannot read /no/such/cert"),
    ],
)
def test_a_coordinator_that_cannot_start_prints_one_error_line(
    arguments: tuple[str, ...],
    environ: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both commands that start one."""
    monkeypatch.setattr(logging.getLogger("paceline_server.app"), "setLevel", lambda level: None)
    whole = ["--listen", "127.0.0.1:0", *arguments]
    result = CliRunner().invoke(app, ["coordinator", *whole], env=environ)
    assert result.exit_code == 2
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["paceline_server", *whole])
    assert serve_alone() == 1
    for said in (result.stderr, capsys.readouterr().err):
        assert words in said
        assert said.count("\n") == 1


def test_health_needs_no_token_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN_FILE", "/no/such/file")
    with coordinator(token=ALL) as address:
        assert not trouble_at(address)


def test_a_launcher_with_an_invalid_token_prints_one_error_line() -> None:
    result = CliRunner().invoke(app, ["run", __file__], env={"PACELINE_TOKEN": "short"})
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "the token has 5 characters, but needs at least 16" in result.stderr


@pytest.mark.slow
def test_commands_send_but_never_print_the_token(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import paceline\nwith paceline.join() as session: print(session.size)")
    printed = []
    with command("coordinator", "--listen", "0.0.0.0:0", PACELINE_TOKEN=ALL) as server:
        server.wait_for("callers need a token")
        server.wait_for("the token can be read on the wire")
        port = server.stderr.split("listens on 0.0.0.0:")[1].split(" ")[0]
        where = ("--coordinator", f"127.0.0.1:{port.strip(';')}")
        with command("run", *where, str(script), PACELINE_TOKEN=ALL) as ran:
            assert ran.wait() == 0, str(ran)
            printed.append(str(ran))
        with command("status", *where, "--json", PACELINE_TOKEN=ALL) as status:
            assert status.wait() == 0, str(status)
            printed.append(str(status))
        for environ in ({}, {"PACELINE_TOKEN": TWO}):
            with command("drain", "--all", "--job", "default", *where, **environ) as drain:
                assert drain.wait() == 1
                assert "token" in drain.stderr
                assert drain.stderr.count("\n") == 1
                printed.append(str(drain))
        printed.append(str(server))
    assert not any(token in text for text in printed for token in (ALL, TWO))
