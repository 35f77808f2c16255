"""Addresses: what is read, what is refused, and how a worker finds its own."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from typing import Any
from unittest import mock

import pytest

from paceline._base import addresses as address
from paceline._base.addresses import Endpoint, listening_host, parse_endpoint, reachable_endpoint
from paceline.errors import CoordinatorUnreachable, LinkUnavailable


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
def test_parse_endpoint_reads_host_and_port(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text, default_port=7400) == endpoint
    assert parse_endpoint(str(endpoint)) == endpoint


NAMES = ["a..b:1", f"{'x' * 64}:1", "a b:1", "http://a:1", "user@a:1", "a\0b:1"]
BRACKETS = ["[]:1", "[[a]]:1", "[a:1", "a]:1", "a[b]:1", "[a]b]:1"]


@pytest.mark.parametrize(
    "text", ["", ":1", "host:", "host:x", "host:65536", "::1:80", "host:-1", "host", *BRACKETS, *NAMES]
)
def test_parse_endpoint_refuses_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        parse_endpoint(text)


def test_a_coordinator_on_loopback_gives_a_loopback_worker_address() -> None:
    for host in ("localhost", "127.0.0.1", "127.0.0.2", "::1"):
        coordinator = Endpoint(host, 1)
        assert coordinator.is_loopback
        assert asyncio.run(reachable_endpoint(coordinator, None)).is_loopback


@pytest.mark.parametrize(
    ("host", "ip"), [("10.0.0.1", "10.0.0.1"), ("fd00:0::1", "fd00::1"), ("FE80::1%eth0", "fe80::1%eth0"), ("a", None)]
)
def test_endpoint_ip_is_normalized(host: str, ip: str | None) -> None:
    assert Endpoint(host, 1).ip == ip


def test_advertised_address_overrides_the_detected_one() -> None:
    for text, port in (("10.1.2.3:5000", 5000), ("10.1.2.3", 0), ("[fd00::7]:5000", 5000), ("[fd00::7]", 0)):
        found = asyncio.run(reachable_endpoint(Endpoint("127.0.0.1", 1), text))
        assert found == parse_endpoint(text, default_port=port)


@pytest.mark.parametrize(
    ("own", "advertise", "listens"),
    [
        ("10.1.2.3", None, {"10.1.2.3"}),
        ("10.1.2.3", "10.1.2.3", {"::", "0.0.0.0"}),  # that is the point
        ("node7", "node7:1", {"::", "0.0.0.0"}),
        ("fd00::7", "[fd00::7]:1", {"::"}),
        ("127.0.0.1", "127.0.0.1:1", {"127.0.0.1"}),
        ("localhost", "localhost", {"127.0.0.1"}),
        ("::1", "[::1]", {"::1"}),
    ],
)
def test_an_advertised_address_listens_everywhere_unless_loopback(
    own: str, advertise: str | None, listens: set[str]
) -> None:
    assert listening_host(Endpoint(own, 0), advertise) in listens


class Resolver:
    """In place of `socket.getaddrinfo`: names in a dict, IP literals as ever; others are unknown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: dict[str, list[str] | socket.gaierror] = {}
        self.asked: list[str] = []
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, *arguments: Any, **options: Any) -> Any:
        if options.get("flags") == socket.AI_NUMERICHOST:
            return self._real(host, *arguments, **options)
        self.asked.append(host)
        found = self.names.get(host, socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
        if isinstance(found, socket.gaierror):
            raise found
        return [entry for ip in found for entry in self._real(ip, None, type=socket.SOCK_STREAM)]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    return Resolver(monkeypatch)


def _reachable(*arguments: Any) -> Endpoint:
    """What `reachable_endpoint` returns; between two tries it waits only briefly."""
    return asyncio.run(reachable_endpoint(*arguments, retry_s=0.001))


def _find(coordinator: str, advertise: str | None, timeout: float = 0.0) -> tuple[Endpoint, list[str]]:
    said: list[str] = []
    return _reachable(parse_endpoint(coordinator), advertise, timeout, said.append), said


def test_an_unresolvable_name_is_named_in_the_error(resolver: Resolver) -> None:
    with pytest.raises(CoordinatorUnreachable, match="coord:7400: the name 'coord' does not resolve: Name or service"):
        _find("coord:7400", None)
    with pytest.raises(CoordinatorUnreachable, match="'coord' does not resolve"):
        _find("coord:7400", "10.1.1.1")
    resolver.names["coord"] = ["127.0.0.1"]
    with pytest.raises(LinkUnavailable, match=r"reach it at 'node7' .*'node7' does not resolve"):
        _find("coord:7400", "node7:5000")


@pytest.mark.parametrize("trouble", [socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_FAIL])
def test_a_name_that_appears_later_is_waited_for(resolver: Resolver, trouble: int) -> None:
    """A container that starts beside this one has no name yet: that looks like a slip of the pen for a while."""
    resolver.names["coord"] = socket.gaierror(trouble, "not yet")

    def say(text: str) -> None:
        said.append(text)
        resolver.names["coord"] = ["127.0.0.9"]

    said: list[str] = []
    found = _reachable(Endpoint("coord", 7400), None, 10.0, say)
    assert found.is_loopback
    assert said == ["cannot reach the coordinator at coord:7400: the name 'coord' does not resolve: not yet"]


def test_a_lasting_lookup_failure_is_reported_once_until_the_timeout(resolver: Resolver) -> None:
    said: list[str] = []
    with pytest.raises(CoordinatorUnreachable, match="'coord' does not resolve"):
        _reachable(Endpoint("coord", 7400), None, 0.05, said.append)
    assert len(said) == 1
    assert len(resolver.asked) > 1


def test_a_stalled_resolver_is_reported_and_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    resolver = Resolver(monkeypatch)
    resolver.names["coord"] = ["127.0.0.1"]
    answer = resolver.__call__

    def stall(host: str, *arguments: Any, **options: Any) -> Any:
        if options.get("flags") != socket.AI_NUMERICHOST:
            release.wait(20)
        return answer(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", stall)
    said: list[str] = []
    start = time.monotonic()
    try:
        with pytest.raises(CoordinatorUnreachable, match="'coord' does not resolve: the resolver does not answer"):
            asyncio.run(reachable_endpoint(Endpoint("coord", 7400), None, 0.05, said.append, slow_s=0.01))
        assert said[0] == "still looking up the name 'coord': the resolver has not answered yet"
        assert time.monotonic() - start < 5  # asyncio's own pool would be waited for at the end of the loop
    finally:
        release.set()


def test_an_address_without_a_route_is_skipped(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name has an IPv6 address more often than a host has a way there."""
    resolver.names["coord"] = ["fd00::1", "10.0.0.1"]
    ways = {"10.0.0.1": "10.0.0.7"}

    def source(_: Any, target: tuple[Any, ...]) -> str:
        if target[0] in ways:
            return ways[target[0]]
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(address, "_source", source)
    assert _find("coord:7400", None) == (Endpoint("10.0.0.7", 0), [])
    ways.clear()
    with pytest.raises(
        CoordinatorUnreachable, match="cannot reach the coordinator at coord:7400: Network is unreachable"
    ):
        _find("coord:7400", None)


def test_the_route_to_an_answering_coordinator_address_is_chosen(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver.names["coord"] = ["10.0.0.1", "10.1.0.1", "10.2.0.1"]
    ways = {"10.0.0.1": "10.0.0.7", "10.1.0.1": "10.1.0.7", "10.2.0.1": "10.2.0.7"}
    there = {"10.1.0.1"}

    async def answers(target: tuple[Any, ...], port: int, knock_s: float) -> bool:
        return target[0] in there

    monkeypatch.setattr(address, "_source", lambda _, target: ways[target[0]])
    monkeypatch.setattr(address, "_answers", answers)
    assert _find("coord:7400", None)[0] == Endpoint("10.1.0.7", 0)
    there.clear()
    with pytest.raises(
        CoordinatorUnreachable, match=r"answers at none of its addresses \(10.0.0.1, 10.1.0.1, 10.2.0.1"
    ):
        _find("coord:7400", None)


def test_a_link_local_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(socket.socket):
        def connect(self, _: Any) -> None:
            pass

        def getsockname(self) -> Any:
            return ("fe80::7", 1, 0, 2)

    monkeypatch.setattr(socket, "socket", Probe)
    with pytest.raises(ValueError, match="fe80::7, a link-local address"):
        _find("[fe80::1]:7400", None)


def test_running_out_of_file_descriptors_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(host: str, port: int) -> Any:
        raise OSError(errno.EMFILE, "too many files")

    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(OSError, match="too many files"):
        asyncio.run(address.is_refused(Endpoint("127.0.0.1", 1), 1.0))


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (("refuses",), False),
        (("refuses", "refuses"), False),
        (("answers",), True),
        (("silent", "answers"), True),
        (("refuses", "answers"), True),
        (("silent",), None),
        (("refuses", "silent"), None),
        (("no route",), None),
    ],
)
def test_probe_combines_the_results_of_all_addresses_of_a_host(
    ends: tuple[str, ...], said: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is silent hides none of the others, and only refusals of all prove that nobody is there."""
    family = socket.AF_INET

    async def look_up(_: str) -> Any:
        return [(family, (f"{number}", 0)) for number in range(len(ends))]

    async def connect(host: str, _: int) -> Any:
        end = ends[int(host)]
        if end == "refuses":
            raise ConnectionRefusedError
        if end == "no route":
            raise OSError(errno.EHOSTUNREACH, "no route to host")
        if end == "silent":
            await asyncio.Event().wait()
        return None, mock.Mock()

    monkeypatch.setattr(address, "look_up", look_up)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    assert asyncio.run(address.probe(Endpoint("node", 1), 60.0, knock_s=0.01)) is said
    assert asyncio.run(address.is_refused(Endpoint("node", 1), 60.0, knock_s=0.01)) is (said is False)


def test_probe_with_a_stalled_lookup_returns_none_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stalled(_: str) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(address, "look_up", stalled)
    assert asyncio.run(address.probe(Endpoint("node", 1), 0.01)) is None
