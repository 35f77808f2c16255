"""Who gets in with what, who does not, and what it leaves behind: nothing."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterator

import pytest
from unit.links.shm_pair import PEERS, descriptors, shm_host

from paceline._base.waits import LoopThread
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline._links.shm import handover
from paceline._links.shm.control_segment import CONTROL_BYTES, LAYOUT
from paceline._links.shm.handover import ShmHost, ShmLimits, connect
from paceline._links.shm.incoming import ShmIncoming
from paceline._links.shm.outgoing import ShmOutgoing
from paceline._links.shm.segment import Segment
from paceline.errors import LinkUnavailable

TICKET = b"t" * 16
OPENING = struct.Struct("<4sHHQ")


@pytest.fixture
def hosted() -> Iterator[tuple[LoopThread, ShmHost]]:
    with shm_host() as made:
        yield made


def expect(thread: LoopThread, host: ShmHost, ticket: bytes = TICKET) -> list[ShmIncoming]:
    made: list[ShmIncoming] = []

    async def on_loop() -> None:
        host.expect(ticket, made.append, Fault(1, 1, 0.0), PEERS[0])

    thread.run(on_loop())
    return made


def dial(thread: LoopThread, name: str, ticket: bytes = TICKET, timeout: float = 5.0) -> ShmOutgoing:
    return thread.run(connect(name, ticket, Fault(1, 0, 0.0), PEERS[1], thread.loop, timeout))


def knock(host: ShmHost, data: bytes, given: list[int]) -> bytes:
    """What a stranger is answered; b"" if it is hung up on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(5.0)
        stranger.connect(f"\0{host.name}")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))] if given else []
        stranger.sendmsg([data], rights)
        return stranger.recv(1000)


def opening(ticket: bytes = TICKET, magic: bytes = b"PLSM", layout: int = LAYOUT, size: int = CONTROL_BYTES) -> bytes:
    return OPENING.pack(magic, layout, len(ticket), size) + ticket


def test_a_ticket_is_accepted_once(hosted: tuple[LoopThread, ShmHost]) -> None:
    thread, host = hosted
    made = expect(thread, host)
    outgoing = dial(thread, host.name)
    (incoming,) = made
    outgoing.send(Frame(FrameKind.DATA, 1, 1, 0, b"", b"hello"), 0.0)
    assert incoming.recv(0.0).payload == b"hello"
    with pytest.raises(LinkUnavailable, match="ticket is unknown"):
        dial(thread, host.name)
    outgoing.close()
    incoming.close()


def test_invalid_openings_are_refused_and_leak_no_descriptor(hosted: tuple[LoopThread, ShmHost]) -> None:
    thread, host = hosted
    control, small = Segment(CONTROL_BYTES), Segment(4096)
    unsealed = os.memfd_create("test")
    os.ftruncate(unsealed, CONTROL_BYTES)
    bell = os.eventfd(0)
    right = [control.fd, bell, bell]
    tries: list[tuple[bytes, list[int], bytes]] = [
        (b"x", right, b"not an opening"),
        (opening()[:-1], right, b"not an opening"),
        (opening() + b"x", right, b"not an opening"),
        (opening() + bytes(1 << 16), right, b"not an opening"),
        (opening(magic=b"HTTP"), right, b"not an opening"),
        (opening(layout=LAYOUT + 1), right, b"has layout"),
        (opening(size=4096), right, b"has layout"),
        (opening(b"another"), right, b"ticket"),
        (opening(b""), right, b"ticket"),
        (opening(), [], b"0 descriptors"),
        (opening(), right[:2], b"2 descriptors"),
        (opening(), [small.fd, bell, bell], b"4096 bytes, not"),
        (opening(), [unsealed, bell, bell], b"cut short"),
        (opening(), [bell, bell, bell], b"not one of sealed memory"),
        (opening(), [control.fd, control.fd, bell], b"eventfds"),
        (opening(), [control.fd, bell, unsealed], b"eventfds"),
    ]
    before = descriptors()
    for data, given, answer in tries:
        made = expect(thread, host)
        assert answer in knock(host, data, given)
        assert not made
    made = expect(thread, host)
    assert knock(host, opening(), [*right, *[bell] * 100]) == b"\x01", "surplus descriptors are closed"
    made[0].close()
    assert descriptors() <= before
    assert not host._strangers
    control.close()
    small.close()
    os.close(unsealed)
    os.close(bell)


def test_a_process_of_another_user_is_refused(
    hosted: tuple[LoopThread, ShmHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, host = hosted
    made = expect(thread, host)
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(handover, "_uid", lambda _: 123456)
        with pytest.raises(LinkUnavailable, match="to another user"):
            dial(thread, host.name)
        assert descriptors() <= before
    theirs = iter([os.geteuid(), 123456])  # the host is ours, but it sees a stranger
    monkeypatch.setattr(handover, "_uid", lambda _: next(theirs))
    with pytest.raises(LinkUnavailable):
        dial(thread, host.name)
    assert not made
    assert descriptors() <= before


def test_uid_returns_the_user_of_the_connected_process() -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert handover._uid(a) == os.geteuid()
    a.close()
    b.close()


def test_connecting_to_a_missing_host_raises_link_unavailable(hosted: tuple[LoopThread, ShmHost]) -> None:
    thread, _ = hosted
    before = descriptors()
    with pytest.raises(LinkUnavailable, match=r"no shared memory with rank 1 \(host-1, pid 101\)"):
        dial(thread, "paceline-nobody")
    assert descriptors() <= before


def test_connecting_to_a_silent_host_raises_after_the_timeout(hosted: tuple[LoopThread, ShmHost]) -> None:
    thread, _ = hosted
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind("\0paceline-mute-test")
        mute.listen(1)
        before = descriptors()
        with pytest.raises(LinkUnavailable, match=r"did not answer in 0.05 s"):
            dial(thread, "paceline-mute-test", timeout=0.05)
        assert descriptors() <= before


def test_connecting_to_a_host_with_a_full_backlog_is_retried(
    hosted: tuple[LoopThread, ShmHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, host = hosted
    made = expect(thread, host)
    real, full = socket.socket.connect, iter(range(3))

    def connect(self: socket.socket, address: str) -> None:
        for _ in full:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    dial(thread, host.name).close()
    made[0].close()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first,
    ):
        mute.bind("\0paceline-full-test")
        mute.listen(0)
        first.connect("\0paceline-full-test")
        with pytest.raises(LinkUnavailable, match=r"did not answer in 0.05 s"):
            dial(thread, "paceline-full-test", timeout=0.05)


def test_unused_tickets_and_silent_connections_expire() -> None:
    with (
        shm_host(ShmLimits(ticket_s=0.0)) as (thread, host),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent,
    ):
        expect(thread, host)
        silent.settimeout(5.0)
        silent.connect(f"\0{host.name}")
        assert silent.recv(10) == b""
        assert not host._expected
        assert not host._strangers


def test_connections_above_max_strangers_are_not_accepted_yet() -> None:
    with shm_host(ShmLimits(max_strangers=3)) as (thread, host):
        made = expect(thread, host)
        crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(5)]
        for stranger in crowd:
            stranger.connect(f"\0{host.name}")

        descriptors()
        assert len(host._strangers) == 3
        for stranger in crowd:
            stranger.close()
        outgoing = dial(thread, host.name)
        outgoing.close()
        made[0].close()


def test_the_host_accepts_again_after_running_out_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = socket.socket.accept, iter(range(3))

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        for _ in failures:
            raise OSError(24, "Too many open files")
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with shm_host(ShmLimits(recovery_s=0.0)) as (thread, host):
        made = expect(thread, host)
        dial(thread, host.name).close()
        made[0].close()


def test_running_out_of_descriptors_for_a_half_raises_link_unavailable(
    hosted: tuple[LoopThread, ShmHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, host = hosted
    real = os.eventfd
    for allowed in range(2):
        expect(thread, host)
        left = iter(range(allowed))

        def eventfd(initval: int, flags: int = 0, left: Iterator[int] = left) -> int:
            if next(left, None) is None:
                raise OSError(24, "Too many open files")
            return real(initval, flags)

        before = descriptors()
        halves: list[ShmIncoming] = []

        async def on_loop(halves: list[ShmIncoming] = halves) -> None:
            host.expect(TICKET, halves.append, Fault(1, 1, 0.0), PEERS[0])

        thread.run(on_loop())
        with monkeypatch.context() as patch:
            patch.setattr(os, "eventfd", eventfd)
            with pytest.raises(LinkUnavailable, match="Too many open files"):
                dial(thread, host.name)
        for half in halves:
            half.close()
        assert descriptors() <= before


def test_a_closed_host_refuses_connections(hosted: tuple[LoopThread, ShmHost]) -> None:
    thread, host = hosted
    expect(thread, host)
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.connect(f"\0{host.name}")

    async def close() -> None:
        host.close()
        host.close()

    thread.run(close())
    with pytest.raises(LinkUnavailable):
        dial(thread, host.name)
    silent.close()
    assert not host._expected
    assert not host._strangers
