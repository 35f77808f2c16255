"""Knocking at a door, and its owner's knock in turn: what is found, what is said, and what strangers get of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import pytest

from paceline._base.rpc import aio, grpc
from paceline._base.waits import loop_thread
from paceline._elastic.peer_calls import out_of_reach
from paceline._links import grpc_knock
from paceline._links.base import Peer
from paceline._links.grpc_door import Door, DoorLimits
from paceline._links.grpc_knock import Knocker, knock, process_runs
from paceline.credentials import IN_THE_CLEAR, Credentials
from paceline.errors import LinkUnavailable
from pacelinepb.v1 import peer_pb2
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub
from support.certificates import make_folder

JOB = "job"
PATIENCE = 2.0
"""Seconds that are over before it is told what is wrong, where nobody answers."""

LONG = 10.0
"""Seconds that are never over, where somebody does."""

NOBODY = "127.0.0.1:9"
"""An address where nobody listens (discard; RFC 863)."""

_LIMITS = DoorLimits()


@contextmanager
def _door(
    name: str, credentials: Credentials = IN_THE_CLEAR, limits: DoorLimits = _LIMITS
) -> Iterator[tuple[Door, str]]:
    """A door that is open, and its address."""
    thread = loop_thread()
    door = Door(JOB, credentials, limits=limits)
    door.window.member_id = name
    port = thread.run(door.start("127.0.0.1", 0))
    try:
        yield door, f"127.0.0.1:{port}"
    finally:
        thread.run(door.close(0.0))


def _peer(rank: int, name: str, address: str) -> Peer:
    return Peer(rank, name, f"host-{rank}", address, 7)


def _tried(
    peers: list[Peer], own: Knocker, credentials: Credentials = IN_THE_CLEAR, *, patience: float = LONG
) -> list[str]:
    return loop_thread().run(out_of_reach(JOB, peers, own, patience, credentials), 4 * LONG)


def test_two_members_reach_each_other() -> None:
    with _door("a") as (_, here), _door("b") as (_, there):
        assert _tried([_peer(0, "b", there)], Knocker("a", here)) == []


@pytest.mark.parametrize("shut", ["nobody listens", "it is another's"])
def test_a_member_that_cannot_connect_back_is_reported(shut: str) -> None:
    with ExitStack() as stack:
        _, there = stack.enter_context(_door("b"))
        _, other = stack.enter_context(_door("c"))
        own = NOBODY if shut == "nobody listens" else other
        # The member gives up after 0.6 of the time, so that its answer comes before the caller gives up.
        first, advice = _tried([_peer(2, "b", there)], Knocker("a", own), patience=2.5 * PATIENCE)
    head = f"rank 2 (host-2, pid 7) at {there} cannot connect to this worker at {own}: "
    assert first.startswith(head)
    assert ("another worker answers there" if shut == "it is another's" else "refused") in first.removeprefix(head)
    assert advice == "tell peers another address (--advertise)"


def test_a_member_that_does_not_answer_is_reported() -> None:
    with _door("a") as (_, here):
        (trouble,) = _tried([_peer(2, "b", NOBODY)], Knocker("a", here), patience=PATIENCE)
    assert trouble.startswith(f"rank 2 (host-2, pid 7) at {NOBODY} does not answer: ")
    assert "refused" in trouble


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_process_runs_needs_an_answer_from_the_process_itself(tls: bool, tmp_path: Path) -> None:
    credentials = make_folder(tmp_path / "certificates").credentials if tls else IN_THE_CLEAR
    with _door("a", credentials) as (_, there), socket.create_server(("127.0.0.1", 0)) as stopped:
        assert loop_thread().run(process_runs(there, credentials))
        # The kernel takes connections for a process that is stopped, and for this socket, which nobody reads.
        assert not loop_thread().run(process_runs(f"127.0.0.1:{stopped.getsockname()[1]}", credentials))
        assert not loop_thread().run(process_runs(NOBODY, credentials))


def test_a_port_reused_by_another_member_is_no_trouble() -> None:
    """Its port may be another's by now; who is in the line is told anew."""
    with _door("a") as (_, here), _door("c") as (_, there):
        assert _tried([_peer(2, "b", there)], Knocker("a", here)) == []


def test_a_certificate_rejected_by_the_member_is_reported(tmp_path: Path) -> None:
    """Its own is good at the member's door, but what its door shows is of another authority."""
    good, foreign = (make_folder(tmp_path / name) for name in ("good", "foreign"))
    with _door("a", foreign.credentials) as (_, here), _door("b", good.credentials) as (_, there):
        trouble, _ = _tried([_peer(0, "b", there)], Knocker("a", here), good.credentials, patience=2.5 * PATIENCE)
    assert f"cannot connect to this worker at {here}: " in trouble
    assert "handshake" in trouble.lower() or "certificate" in trouble.lower()


@pytest.mark.parametrize(
    ("job", "to_member", "address", "code"),
    [
        (JOB, "a guess", NOBODY, grpc.StatusCode.NOT_FOUND),
        (JOB, "", NOBODY, grpc.StatusCode.NOT_FOUND),
        ("a guess", "b", NOBODY, grpc.StatusCode.NOT_FOUND),
        (JOB, "b", "not the address", grpc.StatusCode.INVALID_ARGUMENT),
        (JOB, "b", "127.0.0.1:0", grpc.StatusCode.INVALID_ARGUMENT),
        (JOB, "b", "x" * 600 + ":1", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_strangers_knock_request_is_refused_without_dialing(
    job: str, to_member: str, address: str, code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a door would be a way to look for open ports behind a packet filter."""
    dialled: list[str] = []

    def remember(self: Credentials, address: str, options: object) -> aio.Channel:
        dialled.append(address)
        raise AssertionError("it knocks")

    async def ask(there: str) -> aio.AioRpcError:
        async with aio.insecure_channel(there) as channel:
            request = peer_pb2.KnockRequest(job=job, from_member="a", to_member=to_member, address=address)
            with pytest.raises(aio.AioRpcError) as caught:
                await PeerServiceStub(channel).Knock(request, timeout=PATIENCE)
            return caught.value

    monkeypatch.setattr(Credentials, "member_channel", remember)
    with _door("b") as (_, there):
        error = loop_thread().run(ask(there))
    assert error.code() is code
    assert not dialled


def test_concurrent_knocks_in_turn_are_limited() -> None:
    """One more is told so, and has not been let through."""
    limits = DoorLimits(max_knocks=2)

    async def ask(there: str, silent: str) -> list[object]:
        async with IN_THE_CLEAR.member_channel(there, options=()) as channel:
            calls = [knock(channel, JOB, "b", Knocker("a", silent), PATIENCE) for _ in range(5)]
            return list(await asyncio.gather(*calls, return_exceptions=True))

    # The first takes all, and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent, _door("b", limits=limits) as (door, there):
        told = loop_thread().run(ask(there, f"127.0.0.1:{silent.getsockname()[1]}"))
        assert door._knocks._under_way == 0
    refused = [error for error in told if isinstance(error, aio.AioRpcError)]
    assert [error.code() for error in refused] == [grpc.StatusCode.UNAVAILABLE] * 3
    assert len([text for text in told if isinstance(text, str) and text]) == 2


def test_a_moved_door_answers_only_at_its_new_address() -> None:
    """Its window, and who lives there; the address before is given up."""
    thread = loop_thread()
    servers: list[int] = []

    def bound() -> None:
        servers.append(len(door._servers))

    with _door("b") as (door, before):
        now = f"127.0.0.2:{thread.run(door.move('127.0.0.2', 0, bound))}"
        assert _tried([_peer(0, "b", now)], Knocker("b", now)) == []
        (trouble,) = _tried([_peer(0, "b", before)], Knocker("b", now), patience=PATIENCE)
        assert "refused" in trouble
        assert len(door._servers) == 1
        assert servers == [2], "nothing has broken off yet when it is told"


class _Stuck:
    """A server that does not say that it has stopped, as grpc's while it writes to a host that is gone."""

    def __init__(self, server: aio.Server, until: asyncio.Event) -> None:
        self._server = server
        self._until = until

    async def stop(self, grace: float | None) -> None:
        await self._server.stop(grace)
        await self._until.wait()


def test_a_door_moves_and_closes_without_waiting_for_a_server_that_does_not_stop() -> None:
    thread, until = loop_thread(), asyncio.Event()
    with _door("b") as (door, before):
        door._servers[0] = cast("aio.Server", _Stuck(door._servers[0], until))
        now = f"127.0.0.2:{thread.run(door.move('127.0.0.2', 0, lambda: None))}"
        assert _tried([_peer(0, "b", now)], Knocker("b", now)) == []
        assert _tried([_peer(0, "b", before)], Knocker("b", now), patience=PATIENCE)
        assert len(door._stopping) == 1
        door._servers[0] = cast("aio.Server", _Stuck(door._servers[0], until))
    assert len(door._stopping) == 2
    thread.loop.call_soon_threadsafe(until.set)


def test_a_door_that_cannot_move_keeps_its_address() -> None:
    def bound() -> None:
        raise AssertionError("it is not")

    with _door("b") as (door, there):
        with pytest.raises(LinkUnavailable):
            loop_thread().run(door.move("127.0.0.1", int(there.rpartition(":")[2]), bound))
        assert _tried([_peer(0, "b", there)], Knocker("b", there)) == []


def test_a_crowded_door_is_tried_again() -> None:
    loop = loop_thread().loop
    with _door("a") as (_, here), _door("b") as (door, there):
        door._knocks._under_way = grpc_knock.MAX_AT_ONCE
        loop.call_soon_threadsafe(loop.call_later, 0.3, setattr, door._knocks, "_under_way", 0)
        assert _tried([_peer(0, "b", there)], Knocker("a", here)) == []
        door._knocks._under_way = grpc_knock.MAX_AT_ONCE
        (trouble,) = _tried([_peer(0, "b", there)], Knocker("a", here), patience=PATIENCE)
    assert f"at {there} answers, but refuses for now: this worker is knocking at 64 doors already" in trouble


@pytest.mark.parametrize(("left", "seconds"), [(None, 10.0), (100.0, 10.0), (3.0, 1.8), (0.3, 0.2), (0.0, 0.2)])
def test_the_time_for_a_knock_in_turn_is_bounded(left: float | None, seconds: float) -> None:
    """However short the `failure_timeout` of whoever asked; and it is through before that is over, if it can be."""
    assert grpc_knock._seconds_in_turn(left) == pytest.approx(seconds)


def test_a_door_with_a_slow_knock_in_turn_is_not_reported_as_silent() -> None:
    """Its knock in turn takes longer than the caller waits."""

    async def ask(there: str, silent: str) -> str:
        async with IN_THE_CLEAR.member_channel(there, options=()) as channel:
            return await knock(channel, JOB, "b", Knocker("a", silent), 0.1, words_s=5 * PATIENCE)

    limits = DoorLimits(least_knock_s=30.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, _door("b", limits=limits) as (_, there):
        told = loop_thread().run(ask(there, f"127.0.0.1:{silent.getsockname()[1]}"))
    assert told == "it did not confirm within 0.1 s that it can"
