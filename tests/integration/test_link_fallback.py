"""What is not there, runs out, or is refused: the next kind of link takes its place, or the error is typed."""

from __future__ import annotations

import array
import errno
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from integration.mixed_world import MixedWorld, Place, kinds_of, mixed_world, run_all
from paceline._group import Group
from paceline._links.grpc_door import Door, DoorLimits
from paceline._links.registry import LinkKinds
from paceline._links.shm import handover, shm_kind
from paceline._links.shm.arena import Arena
from paceline._links.shm.control_segment import CONTROL_BYTES, LAYOUT, STAGING_AT
from paceline._links.shm.shm_kind import ShmKind
from paceline._links.tcp import MAX_STREAMS, TICKET_BYTES, TcpKind
from paceline._links.tcp._tcp_wire import ACCEPTED, Hello, encode_hello
from paceline.errors import LimitExceeded, PacelineError, PeerBrokeProtocol, PeerLost, PeerRaised
from pacelinepb.v1 import peer_pb2

N = 1_500_001
"""float64: several frames for each rank, the last of them shorter."""


def total(group: Group) -> float:
    """All elements of an all_reduce of several frames, in memory that may be lent and in memory that may not."""
    lent = group.empty(N, np.float64)
    lent[:] = np.arange(N) + group.rank
    first = group.all_reduce(lent, op="sum")
    second = group.all_reduce(np.array(lent), op="sum")
    assert np.array_equal(first, second)
    expected = group.size * np.arange(N) + sum(range(group.size))
    assert np.array_equal(first, expected)
    return float(first[-1])


def check_works_over(world: MixedWorld, kind: str) -> None:
    run_all(world.groups, total)
    for mesh in world.meshes:
        assert set(kinds_of(mesh).values()) == {kind}


def failing(real: Callable[..., Any], number: int, when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    """The same call, which fails with this error."""

    def call(*arguments: Any) -> Any:
        if when(*arguments):
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    return call


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EPERM, errno.ENOSYS])
def test_links_fall_back_to_tcp_without_memfd(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", failing(os.memfd_create, number))
    with mixed_world([Place()] * 3) as world:
        check_works_over(world, "tcp")


def test_links_fall_back_to_tcp_without_control_segment_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, errno.ENOSPC))
    with mixed_world([Place()] * 2) as world:
        check_works_over(world, "tcp")


def test_arrays_use_ordinary_memory_when_shared_memory_is_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, and everything goes on, by copies."""
    monkeypatch.setattr(shm_kind, "arena", lambda made=Arena(): made)  # noqa: B008  one for the test
    with mixed_world([Place()] * 2) as world:
        run_all(world.groups, lambda group: group.barrier())  # the links are there
        real = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", failing(real, errno.ENOSPC, lambda fd, at, size: size > 4 << 20))
        with caplog.at_level(logging.WARNING):
            check_works_over(world, "shm")
    assert [r.getMessage()[:33] for r in caplog.records] == ["no shared memory for an array of "]


def test_a_frame_without_shared_memory_raises_limit_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    with mixed_world([Place()] * 3) as world:
        run_all(world.groups, lambda group: group.barrier())
        real = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", failing(real, errno.ENOSPC, lambda fd, at, size: at >= STAGING_AT))

        def fail(group: Group) -> PacelineError:
            with pytest.raises(PacelineError) as caught:
                group.broadcast(np.ones(N), root=1)
            return caught.value

        errors = run_all(world.groups, fail)
    assert type(errors[1]) is LimitExceeded
    assert "no shared memory is left for a frame of" in str(errors[1])
    assert {type(error) for error in errors} <= {LimitExceeded, PeerRaised}
    assert {error.ranks for error in errors if isinstance(error, PeerRaised)} == {(1,)}


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that does not answer: as if a firewall dropped what comes for it."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):  # the kernel keeps one more than it is told, and drops what would be the next
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield full.getsockname()[1]


def test_links_fall_back_to_grpc_when_the_data_port_is_silent() -> None:
    with silent_port() as port:

        def drop(door: Door) -> None:
            tcp = door.kinds.of(TcpKind).host
            assert tcp is not None
            tcp.port = port

        with mixed_world([Place(links=("tcp",))] * 2, prepare=drop, limits=DoorLimits(open_s=0.2)) as world:
            check_works_over(world, "grpc")


def test_links_fall_back_to_grpc_when_the_data_port_refuses() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen

        def refuse(door: Door) -> None:
            tcp = door.kinds.of(TcpKind).host
            assert tcp is not None
            tcp.port = unused.getsockname()[1]

        with mixed_world([Place(node="")] * 2, prepare=refuse) as world:
            check_works_over(world, "grpc")


def test_links_fall_back_to_tcp_when_the_shm_socket_is_missing() -> None:
    """Each believes that it shares a node with the other; the kernel knows better."""

    def elsewhere(door: Door) -> None:
        shm = door.kinds.of(ShmKind).host
        assert shm is not None
        shm.name = f"paceline-{secrets.token_hex(16)}"

    with mixed_world([Place()] * 2, prepare=elsewhere) as world:
        check_works_over(world, "tcp")


def test_links_fall_back_to_tcp_when_the_shm_socket_is_another_users(monkeypatch: pytest.MonkeyPatch) -> None:
    users = iter(range(100_000, 200_000))
    monkeypatch.setattr(handover, "_uid", lambda _: next(users))
    with mixed_world([Place()] * 2) as world:
        check_works_over(world, "tcp")


@pytest.mark.parametrize(
    ("mine", "theirs", "kind"),
    [
        (("grpc",), ("shm", "tcp", "grpc"), "grpc"),
        (("grpc",), ("tcp",), "grpc"),
        (("shm",), ("tcp",), "grpc"),
        (("tcp",), ("shm", "tcp", "grpc"), "tcp"),
        (("shm", "grpc"), ("shm", "tcp", "grpc"), "shm"),
        (("grpc", "tcp", "shm"), ("shm",), "shm"),  # the order of the words does not matter
    ],
)
def test_a_kind_of_link_that_one_side_excludes_is_not_used(
    mine: tuple[str, ...], theirs: tuple[str, ...], kind: str
) -> None:
    with mixed_world([Place(links=mine), Place(links=theirs)]) as world:
        check_works_over(world, kind)


def test_a_door_that_chooses_an_unoffered_kind_breaks_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not asked again for ever."""

    def choose(self: LinkKinds, hello: peer_pb2.HelloRequest, *_: object) -> peer_pb2.HelloResponse:
        asked.append(hello)
        return peer_pb2.HelloResponse(chosen=peer_pb2.LINK_KIND_UNSPECIFIED, ticket=secrets.token_bytes(16))

    asked: list[peer_pb2.HelloRequest] = []
    monkeypatch.setattr(LinkKinds, "expect", choose)
    with mixed_world([Place()] * 2) as world:

        def fail(group: Group) -> PacelineError:
            with pytest.raises(PacelineError) as caught:
                group.all_reduce(np.ones(N), timeout=5.0)
            return caught.value

        errors = run_all(world.groups, fail)
    assert {type(error) for error in errors} <= {PeerBrokeProtocol, PeerLost}
    assert len(asked) <= 4


@pytest.mark.parametrize(("mine", "theirs"), [(1, 4), (4, 1), (MAX_STREAMS, 3)])
def test_each_direction_has_the_stream_count_of_its_writer(mine: int, theirs: int) -> None:
    places = [Place(links=("tcp",), streams=streams) for streams in (mine, theirs)]
    with mixed_world(places) as world:
        check_works_over(world, "tcp")
        for mesh, wanted in zip(world.meshes, (mine, theirs), strict=True):
            (link,) = mesh._dialled
            assert len(link._out._streams) == wanted  # type: ignore[union-attr]


def words_for_tcp() -> list[bytes]:
    return [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        secrets.token_bytes(1000),
        encode_hello(Hello(secrets.token_bytes(TICKET_BYTES), 0, 1)),
        encode_hello(Hello(bytes(TICKET_BYTES), 3, 16))[:-1],
    ]


def words_for_shm() -> list[bytes]:
    right = handover._OPENING.pack(handover._MAGIC, LAYOUT, 16, CONTROL_BYTES)
    return [b"x", secrets.token_bytes(1000), right, right + secrets.token_bytes(16)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_strangers_without_a_ticket_do_not_disturb_collectives(kind: str) -> None:
    """They come while a collective runs, with open hands and with nonsense, again and again."""
    rounds = 6
    with mixed_world([Place(links=(kind,))] * 3) as world, ExitStack() as stack:
        run_all(world.groups, total)
        before = len(os.listdir("/proc/self/fd"))

        def disturbed(group: Group) -> float:
            if group.rank == 0:
                for _ in range(rounds):
                    for door in world.doors:
                        visit(door)
                    total(group)
            else:
                for _ in range(rounds):
                    total(group)
            return total(group)

        bell = os.eventfd(0)
        stack.callback(os.close, bell)

        def visit(door: Door) -> None:
            for words in words_for_tcp() if kind == "tcp" else words_for_shm():
                if kind == "tcp":
                    tcp = door.kinds.of(TcpKind).host
                    assert tcp is not None
                    with socket.create_connection(("127.0.0.1", tcp.port), 5.0) as there:
                        with suppress(OSError):  # it has hung up already
                            there.sendall(words)
                            there.shutdown(socket.SHUT_WR)
                        assert _answer(there) != ACCEPTED
                    continue
                shm = door.kinds.of(ShmKind).host
                assert shm is not None
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as there:
                    there.settimeout(5.0)
                    there.connect(f"\0{shm.name}")
                    rights = array.array("i", [bell, bell, bell])
                    there.sendmsg([words], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                    assert _answer(there) not in (b"", handover._ACCEPTED)  # they are told why

        assert len(set(run_all(world.groups, disturbed))) == 1
        for mesh in world.meshes:
            assert set(kinds_of(mesh).values()) == {kind}
        for door in world.doors:
            assert not any(
                each.host._strangers for each in door.kinds if isinstance(each, ShmKind | TcpKind) and each.host
            )
        assert len(os.listdir("/proc/self/fd")) == before + 1, "only the bell"


def _answer(there: socket.socket) -> bytes:
    try:
        return there.recv(200)
    except ConnectionResetError:
        return b""
