"""The health check of a coordinator: near, far, and where there is none."""

from __future__ import annotations

import socket
import sys

import numpy as np
import pytest

import paceline
from paceline.cli.health import main, trouble_at
from paceline.testing import coordinator
from support.relay import relay


def test_a_coordinator_with_high_latency_is_healthy() -> None:
    with coordinator() as address, relay(address, seconds=0.2) as far:
        assert not trouble_at(far.address)


def test_a_worker_joins_over_a_link_with_high_latency() -> None:
    with (
        coordinator() as address,
        relay(address, seconds=0.2) as far,
        paceline.join(far.address, job="far", min_workers=1) as session,
    ):
        assert session.group.all_reduce(np.ones(1)) == 1.0


def test_health_of_a_refusing_address_prints_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, so that nobody else gets it; and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(sys, "argv", ["health", address])
        with pytest.raises(SystemExit, match=f"^paceline: {address} does not answer: .*refused"):
            main()
