"""What is typed: `paceline coordinator --state etcd://...` twice, and `paceline status` with both addresses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.etcd import cluster, needs_etcd
from support.failover import coordinators

pytestmark = [pytest.mark.needs(what="etcd"), needs_etcd, pytest.mark.timeout(120)]


def paceline(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_status_reports_the_leader_and_its_epoch(tmp_path: Path) -> None:
    with cluster(tmp_path) as etcd, coordinators(etcd, tmp_path) as pair:
        for _ in range(2):
            leader = pair.leader()
            pair.wait_for_standby(1 - leader)
            done = paceline("status", "--coordinator", pair.addresses, "--json")
            assert done.returncode == 0, done.stderr
            shown = json.loads(done.stdout.splitlines()[-1])
            address, epoch = f"127.0.0.1:{pair.ports[leader]}", pair.epoch_of(leader)
            assert shown == {"jobs": [], "leader": {"address": address, "epoch": epoch}}
            words = paceline("status", "--coordinator", pair.addresses).stdout
            assert f"The coordinator at {address} leads, in epoch {epoch}." in words
            pair.signal(leader, signal.SIGTERM)
            pair.start_again(leader)


def test_a_coordinator_explains_an_unusable_etcd() -> None:
    done = paceline("coordinator", "--listen", "127.0.0.1:0", "--state", "etcd://me:hunter2@127.0.0.1:1/p")
    assert done.returncode != 0
    assert "passwords are not supported" in done.stderr
    assert "hunter2" not in done.stderr
    done = paceline("coordinator", "--listen", "127.0.0.1:0", "--state", "etcd://127.0.0.1:1/p")
    assert done.returncode != 0
    assert "cannot use the state in etcd: etcd at 127.0.0.1:1" in done.stderr
