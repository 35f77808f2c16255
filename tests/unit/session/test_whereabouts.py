"""A member keeps its address while this machine has it, and finds another when it has gone."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

import pytest

from paceline._base.addresses import CoordinatorAddresses, Endpoint
from paceline._session import whereabouts
from paceline._session.whereabouts import Whereabouts, is_here
from paceline.errors import CoordinatorUnreachable, LinkUnavailable

NOT_OURS = "192.0.2.7"
"""Of TEST-NET-1 (RFC 5737): nobody's."""
COORDINATOR = Endpoint("coordinator", 7400)


class _Door:
    """Remembers where it was opened."""

    def __init__(self) -> None:
        self.at: list[tuple[str, str, int]] = []
        self.is_taken = False

    async def start(self, host: str, port: int) -> int:
        self.at.append(("start", host, port))
        return port or 5000 + len(self.at)

    async def move(self, host: str, port: int, bound: Callable[[], None]) -> int:
        if self.is_taken:
            raise LinkUnavailable("it cannot be bound")
        bound()
        self.at.append(("move", host, port))
        return port or 5000 + len(self.at)


class _Sockets:
    def __init__(self) -> None:
        self.ports: list[int] = []

    def listen(self, port: int) -> None:
        self.ports.append(port)


class _World:
    """What a machine's interfaces and routes say.

    Attributes:
        here: addresses that it has.
        way: the one that leads to the coordinator, or why there is none.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, advertise: str | None = None) -> None:
        self.here = {"10.0.0.1"}
        self.way: str | Exception = "10.0.0.1"
        self.door, self.sockets = _Door(), _Sockets()
        self.left: list[str] = []
        self.member: Any = Whereabouts(CoordinatorAddresses([COORDINATOR]), advertise, self.door, self.sockets)  # type: ignore[arg-type]

        async def reachable(coordinator: Endpoint, advertise: str | None, *_: Any) -> Endpoint:
            assert coordinator is COORDINATOR
            if isinstance(self.way, Exception):
                raise self.way
            return Endpoint(advertise or self.way, 0)

        monkeypatch.setattr(whereabouts, "reachable_endpoint", reachable)
        monkeypatch.setattr(whereabouts, "is_here", lambda host: host in self.here)

    def open_door(self) -> None:
        asyncio.run(self.member.open_door(0.0, lambda _: None))

    def renew(self) -> bool:
        moved: bool = asyncio.run(self.member.renew(0.0, self.left.append))
        return moved


def test_an_address_this_machine_still_has_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another one leads to the coordinator now: peers know this one, and it works."""
    world = _World(monkeypatch)
    world.open_door()
    world.way = "10.0.0.2"
    assert not world.renew()
    assert str(world.member.address) == "10.0.0.1:5001"
    assert world.door.at == [("start", "10.0.0.1", 0)]


def test_a_lost_address_is_replaced_by_the_one_toward_the_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = _World(monkeypatch)
    world.open_door()
    world.here = {"10.0.0.2"}
    world.way = "10.0.0.2"
    assert world.renew()
    assert str(world.member.address) == "10.0.0.2:5002"
    assert world.door.at[1:] == [("move", "10.0.0.2", 0)]
    assert world.sockets.ports == [5001, 5002]
    assert world.left == ["this worker's address was 10.0.0.1 and is 10.0.0.2 now"]
    assert not world.renew(), "once"


@pytest.mark.parametrize("way", [CoordinatorUnreachable("no route"), ValueError("a link-local address")])
def test_without_a_route_to_the_coordinator_the_address_is_kept(
    way: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = _World(monkeypatch)
    world.open_door()
    world.here, world.way = set(), way
    with pytest.raises(CoordinatorUnreachable, match=str(way)):
        world.renew()
    assert (len(world.door.at), world.left, str(world.member.address)) == (1, [], "10.0.0.1:5001")
    world.way = "10.0.0.1"  # it comes back as it was, between the two looks
    assert not world.renew()
    assert len(world.door.at) == 1


def test_the_old_address_is_kept_until_the_new_one_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(monkeypatch)
    world.open_door()
    world.here, world.way, world.door.is_taken = {"10.0.0.2"}, "10.0.0.2", True
    with pytest.raises(LinkUnavailable):
        world.renew()
    assert (world.left, str(world.member.address)) == ([], "10.0.0.1:5001")
    world.door.is_taken = False
    assert world.renew()
    assert len(world.left) == 1


def test_an_advertised_address_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(monkeypatch, advertise="10.9.9.9")
    world.open_door()
    world.here = set()
    assert not world.renew()
    assert world.member.address.host == "10.9.9.9"


@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("0.0.0.0", True), (NOT_OURS, False), ("some-name", True)],
)
def test_is_here_recognizes_addresses_of_this_machine(host: str, here: bool) -> None:
    assert is_here(host) is here


def test_is_here_is_true_if_the_check_is_not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoSocket(socket.socket):
        def bind(self, *_: Any) -> None:
            raise OSError(errno.EPERM, "not allowed")

    monkeypatch.setattr(socket, "socket", NoSocket)
    assert is_here(NOT_OURS)
