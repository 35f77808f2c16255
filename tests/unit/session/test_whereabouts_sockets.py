"""What is told of a session's sockets: addresses at once, names when they are known, and the last ones while not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from paceline._base.addresses import Endpoint
from paceline._session import whereabouts
from paceline._session.whereabouts import Sockets


def test_dialed_addresses_are_protected_at_once_and_names_when_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, set[tuple[str, int]]]] = []
    names: dict[str, set[str]] = {"coordinator": {"10.0.0.1", "fd00::1"}}

    async def look_up_all(hosts: set[str]) -> dict[str, set[str]]:
        return {host: names.get(host, set()) for host in hosts}

    def protect(key: int, *, listening_port: int, dialled: set[tuple[str, int]]) -> None:
        told.append((listening_port, dialled))

    monkeypatch.setattr(whereabouts, "look_up_all", look_up_all)
    monkeypatch.setattr(whereabouts, "protect", protect)
    started: list[Coroutine[Any, Any, None]] = []
    mine = Sockets(started.append)
    mine.listen(7)
    mine.dial([Endpoint("coordinator", 1), Endpoint("10.0.0.2", 2), Endpoint("FD00::0:2", 3)])
    literal = {("10.0.0.2", 2), ("fd00::2", 3)}
    assert told == [(7, literal)]
    asyncio.run(started.pop())
    coordinator = {("10.0.0.1", 1), ("fd00::1", 1)}
    assert told[1:] == [(7, literal | coordinator)]
    names.clear()  # the name service is away: what was known counts
    mine.dial([Endpoint("coordinator", 1), Endpoint("10.0.0.3", 2)])
    asyncio.run(started.pop())
    assert told[2:] == [(7, coordinator | {("10.0.0.3", 2)})] * 2
    mine.forget()
    assert told[4:] == [(0, set())]


def test_literal_addresses_need_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    monkeypatch.setattr(whereabouts, "protect", lambda *_, **__: None)
    Sockets(lambda _: pytest.fail("nothing is to be looked up")).dial([Endpoint("10.0.0.2", 2)])
