"""`paceline coordinator` and `paceline status` as processes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.health import trouble_at
from support.command import Command, command


def address_of(coordinator: Command) -> str:
    coordinator.wait_for("listens on")
    found = re.search(r"listens on (\S+)", coordinator.stderr)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_coordinator_prints_its_address_and_ends_on_a_signal(signum: signal.Signals, tmp_path: Path) -> None:
    with command("coordinator", "--listen", "127.0.0.1:0", "--state", str(tmp_path / "state.db")) as coordinator:
        address = address_of(coordinator)
        coordinator.wait_for("only this machine can reach it")
        assert not trouble_at(address)
        coordinator.signal(signum)
        assert coordinator.wait() == 0
    assert "Traceback" not in coordinator.stderr
    assert (tmp_path / "state.db").exists()


def test_a_coordinator_on_all_interfaces_does_not_claim_to_be_private() -> None:
    with command("coordinator", "--listen", "0.0.0.0:0", "--insecure") as coordinator:
        address_of(coordinator)
        coordinator.signal(signal.SIGTERM)
        assert coordinator.wait() == 0
    assert "only this machine" not in coordinator.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "node1"])
def test_listening_publicly_without_a_secret_is_refused(host: str) -> None:
    with command("coordinator", "--listen", f"{host}:7400") as coordinator:
        assert coordinator.wait() == 2
    assert coordinator.stderr.startswith(f"paceline: everyone who can reach {host}:7400 could join")
    assert coordinator.stderr.count("\n") == 1
    for advice in ("--token-file", "PACELINE_TOKEN", "--tls-ca", "--insecure"):
        assert advice in coordinator.stderr


def test_a_port_in_use_prints_one_error_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with command("coordinator", "--listen", f"127.0.0.1:{port}") as coordinator:
            assert coordinator.wait() == 1
    assert coordinator.stderr.startswith(f"paceline: 127.0.0.1:{port} is in use")
    assert coordinator.stderr.count("\n") == 1


def test_an_unusable_state_file_prints_one_error_line(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_text("this is no database" * 100)
    with command("coordinator", "--listen", "127.0.0.1:0", "--state", str(tmp_path / "state.db")) as coordinator:
        assert coordinator.wait() == 1
    assert "state.db" in coordinator.stderr
    assert coordinator.stderr.count("\n") == 1


def test_status_of_a_coordinator_without_jobs() -> None:
    with command("coordinator", "--listen", "127.0.0.1:0") as coordinator:
        address = address_of(coordinator)
        with command("status", "--coordinator", address, "--json") as status:
            assert status.wait() == 0
        assert json.loads(status.stdout) == {"jobs": []}
        with command("status", "--coordinator", address) as status:
            assert status.wait() == 0
        assert "knows no job yet" in status.stdout
        with command("status", "--coordinator", address, "nope") as status:
            assert status.wait() == 1
        assert status.stderr.startswith("paceline: ")
        assert "nope" in status.stderr
        assert status.stderr.count("\n") == 1


def test_status_at_an_unreachable_address_prints_the_time_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with command("status", "--coordinator", f"127.0.0.1:{port}", "--timeout", "0.5") as status:
        assert status.wait() == 1
    tried = r"\(tried for \d+\.\d s; .*[Cc]onnection refused\)"
    advice = rf"run `paceline coordinator --listen 127.0.0.1:{port}` there"
    assert re.match(rf"paceline: no coordinator answers at 127\.0\.0\.1:{port} {tried}: {advice}", status.stderr)
    assert status.stderr.count("\n") == 1


def test_status_at_a_web_server_prints_one_error_line() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, env={"PYTHONUNBUFFERED": "1"},
    ) as web:  # fmt: skip
        assert web.stdout is not None
        found = re.search(r"port (\d+)", web.stdout.readline())
        assert found is not None
        with command("status", "--coordinator", f"127.0.0.1:{found[1]}", "--timeout", "0.5") as status:
            assert status.wait() == 1
        web.kill()
    assert status.stderr.startswith("paceline: ")
    assert status.stderr.count("\n") == 1
    assert trouble_at(f"127.0.0.1:{found[1]}", timeout=0.5)
