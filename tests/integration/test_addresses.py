"""Addresses on one machine: names that do not resolve, names that do, IPv6, and what is advertised."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import paceline
from paceline._base.addresses import parse_endpoint
from paceline.config import Config
from paceline.testing import coordinator

pytestmark = pytest.mark.alone

QUICK = Config(failure_timeout=1.0, join_timeout=10.0)


def _meet(address: str, *advertised: str | None) -> list[str]:
    """Members that advertise these meet, and add something up; their addresses."""

    def one(advertise: str | None) -> list[str]:
        with paceline.join(
            address, job="meet", min_workers=len(advertised), advertise=advertise, config=QUICK
        ) as session:
            assert session.group.all_reduce(np.ones(1000))[0] == len(advertised)
            return [member.address for member in session.members]

    with ThreadPoolExecutor(len(advertised)) as pool:
        found = list(pool.map(one, advertised))
    assert all(addresses == found[0] for addresses in found)
    return found[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_members_meet_on_the_coordinators_loopback_address(host: str) -> None:
    with coordinator(listen=f"{host}:0") as address:
        assert address.startswith(host)
        assert {found.rpartition(":")[0] for found in _meet(address, None, None)} == {host}


def test_members_meet_at_addresses_that_they_advertise() -> None:
    """Of both families, and by name."""
    with coordinator() as address:
        found = _meet(address, "127.0.0.1", "[::1]", "localhost")
        assert sorted(parse_endpoint(text).host for text in found) == ["127.0.0.1", "::1", "localhost"]


def test_members_meet_when_given_the_coordinators_host_name() -> None:
    with coordinator() as address:
        _meet(f"localhost:{parse_endpoint(address).port}", None, None)


def test_join_warns_at_once_and_times_out_on_an_unresolved_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    start, began = time.monotonic(), time.time()
    with (
        caplog.at_level(logging.WARNING, "paceline.session"),
        pytest.raises(paceline.CoordinatorUnreachable, match=r"'no-such-host\.invalid' does not resolve"),
    ):
        paceline.join("no-such-host.invalid", timeout=1.5)
    assert 1.5 <= time.monotonic() - start < 4
    said = [record for record in caplog.records if "no-such-host.invalid" in record.getMessage()]
    assert said
    assert said[0].created - began < 1.0


def test_join_fails_if_the_advertised_name_does_not_resolve() -> None:
    with (
        coordinator() as address,
        pytest.raises(paceline.LinkUnavailable, match=r"'no-such-host\.invalid' \(`advertise`\), but the name"),
    ):
        paceline.join(address, advertise="no-such-host.invalid", timeout=0.5)


def test_an_invalid_host_name_raises_value_error() -> None:
    with pytest.raises(ValueError, match="is not a valid host name"):
        paceline.join("coordinator..example:7400")
    with coordinator() as address, pytest.raises(ValueError, match="is not a valid host name"):
        paceline.join(address, advertise="node 7")
