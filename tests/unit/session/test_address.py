"""Addresses: what is read, what is refused, and how a worker finds its own."""

from __future__ import annotations

import asyncio

import pytest

from paceline.errors import CoordinatorUnreachable
from paceline.session.address import Endpoint, parse_endpoint, reachable_endpoint, resolve


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("host:7400", Endpoint("host", 7400)),
        ("127.0.0.1:0", Endpoint("127.0.0.1", 0)),
        ("[::1]:80", Endpoint("::1", 80)),
        ("host", Endpoint("host", 7400)),
        ("[::1]", Endpoint("::1", 7400)),
    ],
)
def test_read(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text, default_port=7400) == endpoint
    assert parse_endpoint(str(endpoint)) == endpoint


BRACKETS = ["[]:1", "[[a]]:1", "[a:1", "a]:1", "a[b]:1", "[a]b]:1"]


@pytest.mark.parametrize("text", ["", ":1", "host:", "host:x", "host:65536", "::1:80", "host:-1", "host", *BRACKETS])
def test_refuse(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        parse_endpoint(text)


def test_a_coordinator_on_loopback_keeps_the_worker_there() -> None:
    for host in ("localhost", "127.0.0.1", "127.0.0.2", "::1"):
        coordinator = Endpoint(host, 1)
        assert coordinator.is_loopback
        assert asyncio.run(reachable_endpoint(coordinator, None)).is_loopback


def test_advertise_wins() -> None:
    assert asyncio.run(reachable_endpoint(Endpoint("127.0.0.1", 1), "node7:5000")) == Endpoint("node7", 5000)
    assert asyncio.run(reachable_endpoint(Endpoint("127.0.0.1", 1), "node7")) == Endpoint("node7", 0)


def test_a_name_that_does_not_resolve_is_said() -> None:
    with pytest.raises(CoordinatorUnreachable, match="no-such-host"):
        asyncio.run(reachable_endpoint(Endpoint("no-such-host.invalid", 7400), None))


def test_resolve() -> None:
    found = asyncio.run(resolve({"127.0.0.1", "localhost", "no-such-host.invalid"}))
    assert found["127.0.0.1"] == {"127.0.0.1"}
    assert found["localhost"] & {"127.0.0.1", "::1"}
    assert found["no-such-host.invalid"] == set()
