"""Whom the guard cuts off and whom it blocks, in a process that always seems to have grown."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from typing import Any

import numpy as np
import pytest

from integration.mixed_world import Place, mixed_world, run_all
from paceline._base.addresses import parse_endpoint
from paceline._base.waits import loop_thread
from paceline._group import Group
from paceline._links.grpc_door import Door
from paceline.credentials import IN_THE_CLEAR
from paceline_server import Coordinator, ServerSettings
from paceline_server._grpc import aio
from paceline_server.dispatcher import Observer
from pacelinepb import PROTOCOL_VERSION, memory_guard
from pacelinepb.memory_guard import BLOCK_SECONDS, FREE_BYTES, Callers, Looks, MemoryGuard
from pacelinepb.pieces import cut, in_messages
from pacelinepb.server_sockets import block, block_of, seen
from pacelinepb.v1 import admin_pb2, peer_pb2
from pacelinepb.v1 import store_pb2 as pb
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.coordinator import RawSession, run
from support.http2 import HEADERS, PREFACE, SETTINGS, frame, open_call

ALWAYS = -1
"""Growth for which a guard looks at connections 20 times a second."""
HERE, THERE = "127.0.0.1", "127.0.0.2"
PATIENCE = 20.0
IGNORED = frame(0xBE, 0, 0, bytes(FREE_BYTES))
"""A frame of an unknown type (RFC 9113, 4.1)."""
TOKEN = "a-token-that-nobody-guesses"
SHOWN = aio.Metadata(("authorization", f"Bearer {TOKEN}"))


class House:
    """A port that is guarded, and the connections to it.

    Attributes:
        callers: the connections that have proved who they are.
        guard: of the port.
    """

    def __init__(self, stack: ExitStack, block_s: float = BLOCK_SECONDS) -> None:
        self._stack = stack
        self.listener = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        self.listener.settimeout(PATIENCE)
        port = self.listener.getsockname()[1]
        self.callers = Callers(60.0)
        self.guard = MemoryGuard(self.callers, {port}, growth_bytes=ALWAYS, block_s=block_s)
        stack.callback(self.guard.close)
        self._address = (HERE, port)

    def come(self, sends: int, origin: str = HERE) -> tuple[socket.socket, socket.socket]:
        """A connection from an address of this machine, on which so many bytes are sent: the caller's end and ours."""
        caller = self._stack.enter_context(socket.create_connection(self._address, PATIENCE, (origin, 0)))
        ours = self._stack.enter_context(self.listener.accept()[0])
        caller.sendall(bytes(sends))
        ours.settimeout(PATIENCE)
        return caller, ours

    def name(self, caller: socket.socket) -> str:
        host, port = caller.getsockname()
        return f"ipv4:{host}:{port}"


def works(pair: tuple[socket.socket, socket.socket]) -> bool:
    caller, ours = pair
    ours.sendall(b"x")
    return caller.recv(1) == b"x"


@pytest.fixture
def house() -> Iterator[House]:
    with ExitStack() as stack:
        yield House(stack)


def test_only_unproven_connections_that_sent_much_are_cut_off(house: House) -> None:
    """One in its handshake stays, however much the process takes, and so does a member whose calls have ended."""
    begins, calls, called = house.come(FREE_BYTES), house.come(0), house.come(0)
    house.callers.came(house.name(calls[0]))
    with house.callers.one(house.name(called[0])):
        pass
    for caller, _ in (calls, called):
        caller.sendall(bytes(100_000))
    stranger = house.come(FREE_BYTES, THERE)
    stranger[0].sendall(b"x")
    with pytest.raises(ConnectionResetError):
        stranger[0].recv(1)
    with pytest.raises(OSError, match=r"reset|not connected"):
        stranger[1].recv(1)  # nothing is left of what has come
    assert all(works(pair) for pair in (begins, calls, called))


def test_an_address_is_blocked_briefly_but_its_connections_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = threading.Event()

    def blocks(fd: int, blocks: Collection[bytes]) -> None:
        block(fd, blocks)
        blocked.set()

    monkeypatch.setattr(memory_guard, "block", blocks)
    with ExitStack() as stack:
        house = House(stack, block_s=2.5)  # TCP tries again after 1 s and after 3 s
        member, _ = house.come(100, THERE), house.come(FREE_BYTES + 1, THERE)
        assert blocked.wait(PATIENCE)
        again = stack.enter_context(socket.socket())
        again.bind((THERE, 0))
        again.setblocking(False)
        assert again.connect_ex(house.listener.getsockname())
        assert works(house.come(100))
        assert not select.select([], [again], [], 0)[1], "the kernel has taken its packet"
        assert works(member)
        assert select.select([], [again], [], PATIENCE)[1], "it has tried again, as TCP does"
        assert not again.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def test_a_listener_opened_later_is_blocked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A door that moves to another port opens a new one."""
    blocked = threading.Event()

    def blocks(fd: int, blocks: Collection[bytes]) -> None:
        if fd == later.fileno() and blocks:
            blocked.set()

    with ExitStack() as stack, socket.create_server((HERE, 0)) as later:
        later.setblocking(False)
        monkeypatch.setattr(memory_guard, "block", blocks)
        house = House(stack, block_s=PATIENCE)
        with pytest.raises(ConnectionResetError):
            house.come(FREE_BYTES + 1)[0].recv(1)
        assert not blocked.is_set()
        house.guard.ports = {later.getsockname()[1]}
        assert blocked.wait(PATIENCE)


def test_a_connection_is_cut_off_with_no_descriptor_left(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: str) -> list[str]:
        raise OSError(24, "Too many open files")

    stranger = house.come(FREE_BYTES + 1)
    monkeypatch.setattr("pacelinepb.server_sockets.os.listdir", none_left)
    with pytest.raises(ConnectionResetError):
        stranger[0].recv(1)


def test_connections_of_other_ports_are_left_alone(house: House) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(socket.create_server((HERE, 0)))
        caller = stack.enter_context(socket.create_connection(other.getsockname(), PATIENCE))
        ours = stack.enter_context(other.accept()[0])
        caller.sendall(bytes(100_000))
        stranger = house.come(FREE_BYTES + 1)
        with pytest.raises(ConnectionResetError):
            stranger[0].recv(1)
        assert works((caller, ours))


def test_inspection_keeps_a_blocking_socket_blocking() -> None:
    """Libraries in C have such sockets; to look at one with Python's would make it one that does not block."""
    with socket.create_server((HERE, 0)) as listener, socket.create_connection(listener.getsockname()) as caller:
        socket.setdefaulttimeout(PATIENCE)
        try:
            assert seen(caller.fileno(), {caller.getsockname()[1]}) is None
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(caller.fileno())


def test_blocks_cover_ipv4_addresses_and_ipv6_networks() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        listener.settimeout(PATIENCE)
        port = listener.getsockname()[1]
        for blocked, free in (("::1", HERE), (HERE, THERE), (THERE, "::1")):
            block(listener.fileno(), [block_of("10.0.0.1"), block_of("2001:db8::1"), block_of(blocked)])
            family = socket.AF_INET6 if ":" in blocked else socket.AF_INET
            with closing(socket.socket(family)) as stays_out:
                stays_out.bind((blocked, 0))
                stays_out.setblocking(False)
                stays_out.connect_ex(("::1" if ":" in blocked else HERE, port))
                target = "::1" if ":" in free else HERE
                with socket.create_connection((target, port), PATIENCE, (free, 0)), listener.accept()[0] as ours:
                    assert ours.getpeername()[0].removeprefix("::ffff:") == free
        block(listener.fileno(), [])
        with socket.create_connection((HERE, port), PATIENCE, (THERE, 0)), listener.accept()[0] as ours:
            assert ours.getpeername()[0] == f"::ffff:{THERE}"


def test_a_block_of_an_ipv6_address_covers_its_network() -> None:
    assert block_of("2001:db8::1") == block_of("2001:db8::2") != block_of("2001:db8:0:1::1")
    assert memory_guard._MOST_BLOCKED <= 60, "`block` takes no more"


def watch(guard: MemoryGuard | None) -> None:
    """From now on the guard of a coordinator or a door looks at connections as if its process always grew."""
    assert guard is not None
    guard._looks = Looks(growth_bytes=ALWAYS)


def look(port: int) -> None:
    """Returns when the guard of this port has looked at all connections: when it has cut off two, one after another."""
    for origin in ("127.0.0.2", "127.0.0.3"):
        with socket.create_connection((HERE, port), PATIENCE, (origin, 0)) as stranger:
            stranger.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + IGNORED)
            until_cut(stranger)


def until_cut(stranger: socket.socket) -> None:
    with pytest.raises(ConnectionResetError):
        _read_all(stranger)


def _read_all(stranger: socket.socket) -> None:
    while stranger.recv(1 << 16):
        pass


@asynccontextmanager
async def serving(observer: Observer | None = None) -> AsyncIterator[tuple[Coordinator, int, aio.Channel]]:
    """A coordinator, its port, and a member's connection to it."""
    coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0", token=TOKEN), observer=observer)
    coordinator._callers._idle = PATIENCE  # this machine may be slow
    try:
        address = await coordinator.start()
        watch(coordinator._guard)
        async with aio.insecure_channel(address) as channel:
            yield coordinator, parse_endpoint(address).port, channel
    finally:
        await coordinator.stop(grace=0.2)


def test_a_members_session_is_not_cut_off_at_the_coordinator() -> None:
    seen: list[str] = []

    async def main() -> None:
        async with serving(lambda what, *_: seen.append(what)) as (_, port, channel):
            session = await RawSession.register(channel, least=1, most=1, token=TOKEN, failure_timeout=60.0)
            await session.view()
            store: Any = StoreServiceStub(channel)
            request = in_messages(pb.SetRequest(caller=session.caller, key="k", value=cut(bytes(1 << 20))))
            await store.Set(request, metadata=SHOWN)
            await asyncio.to_thread(look, port)
            await store.Set(request, metadata=SHOWN)
            assert seen == ["stream_began"]
            await session.leave()

    run(main)


def test_a_refused_stranger_that_keeps_sending_is_cut_off() -> None:
    async def main() -> None:
        async with serving() as (_, port, _):
            await asyncio.to_thread(refused, port)

    def refused(port: int) -> None:
        with socket.create_connection((HERE, port), PATIENCE) as stranger, stranger.makefile("rb") as heard:
            stranger.sendall(open_call("/pacelinepb.v1.StoreService/Get"))
            while (head := heard.read(9))[3] != HEADERS:
                heard.read(int.from_bytes(head[:3], "big"))
            stranger.sendall(IGNORED)
            until_cut(stranger)

    run(main)


def test_a_command_is_not_cut_off_between_its_calls() -> None:
    async def main() -> None:
        async with serving() as (coordinator, port, channel):
            admin: Any = AdminServiceStub(channel)
            for number in range(50):
                more = ("x", f"{number:0100}")
                await admin.ListJobs(admin_pb2.ListJobsRequest(), metadata=aio.Metadata(*SHOWN, more))
            await asyncio.to_thread(look, port)
            await admin.ListJobs(admin_pb2.ListJobsRequest(), metadata=SHOWN)
            places = {*coordinator._callers._calls, *coordinator._callers._ended}
            assert len(places) == 1, "it has come again"

    run(main)


def test_a_link_is_not_cut_off_at_a_door() -> None:
    def total(group: Group) -> float:
        return float(group.all_reduce(np.ones(50_000))[-1])

    def forget(door: Door) -> None:
        watch(door._guard)
        door._callers._idle = 0.0  # the Hello of the link is long ago

    with mixed_world([Place(links=("grpc",))] * 2, prepare=forget) as world:
        assert run_all(world.groups, total) == [2.0, 2.0]
        for door in world.doors:
            assert door._guard is not None
            (port,) = door._guard.ports
            look(port)
        assert run_all(world.groups, total) == [2.0, 2.0]


def test_a_member_is_not_cut_off_at_a_door_between_its_calls() -> None:
    async def main() -> None:
        door = Door("job", IN_THE_CLEAR)
        door._callers._idle = PATIENCE  # this machine may be slow
        port = await door.start(HERE, 0)
        watch(door._guard)
        async with AsyncExitStack() as stack, aio.insecure_channel(f"{HERE}:{port}") as channel:
            stack.push_async_callback(door.close)
            peer: Any = PeerServiceStub(channel)

            async def hello(number: int) -> None:
                with pytest.raises(aio.AioRpcError, match="this is no member of job"):
                    await peer.Hello(peer_pb2.HelloRequest(protocol_version=PROTOCOL_VERSION, job=f"{number:0120}"))

            for number in range(50):
                await hello(number)
            await asyncio.to_thread(look, port)
            await hello(50)
            places = {*door._callers._calls, *door._callers._ended}
            assert len(places) == 1, "it has come again"

    loop_thread().run(main())
