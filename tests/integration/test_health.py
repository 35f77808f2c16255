"""The health check of a coordinator: near, far, and where there is none."""

from __future__ import annotations

import socket
import sys

import pytest

from paceline.cli.health import main, trouble_at
from paceline.testing import coordinator
from support.relay import relay


def test_a_coordinator_that_is_far() -> None:
    with coordinator() as address, relay(address, seconds=0.3) as far:
        assert not trouble_at(far.address)


def test_where_none_is_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(sys, "argv", ["health", address])
    with pytest.raises(SystemExit, match=f"^paceline: {address} does not answer: .*refused"):
        main()
