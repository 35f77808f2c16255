"""The two ends of a link over shared memory in one process, handed over as between two."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

import numpy as np

from paceline._base.waits import LoopThread, loop_thread
from paceline._links.base import Link, LinkEnded, Peer
from paceline._links.conformance import LinkPair
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline._links.shm.arena import Arena, arena
from paceline._links.shm.handover import ShmHost, connect
from paceline._links.shm.incoming import ShmIncoming
from paceline._links.shm.outgoing import ShmOutgoing

__all__ = [
    "PEERS",
    "Halves",
    "ShmLink",
    "descriptors",
    "frame",
    "halves",
    "in_arena",
    "lent",
    "shm_halves",
    "shm_host",
    "shm_link_pair",
    "soon",
]

PEERS = (Peer(0, "member-0", "host-0", pid=100), Peer(1, "member-1", "host-1", pid=101))


class ShmLink(Link):
    """A link of two halves; the control channel that says how it ends is a reference to the other end."""

    kind = "shm"

    def __init__(self, peer: Peer, fault: Fault, outgoing: ShmOutgoing, incoming: ShmIncoming) -> None:
        self.peer = peer
        self.other: ShmLink | None = None
        self._outgoing = outgoing
        self._incoming = incoming
        fault.on_failure(outgoing.wake)
        fault.on_failure(incoming.wake)

    def send(self, frame: Frame, deadline: float) -> None:
        self._outgoing.send(frame, deadline)

    def lend(self, frame: Frame, deadline: float) -> None:
        self._outgoing.lend(frame, deadline)

    def mark(self, number: int, deadline: float) -> bool:
        return self._outgoing.mark(number)

    def await_mark(self, deadline: float) -> Frame | int:
        return self._incoming.await_mark(deadline)

    def await_release(self, deadline: float) -> None:
        self._outgoing.await_release(deadline)

    def recall(self) -> None:
        self._outgoing.recall()

    def release(self) -> None:
        self._incoming.release()

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        return self._incoming.recv(deadline, into)

    def on_readable(self, notify: Callable[[], None]) -> None:
        self._incoming.on_readable(notify)

    def close(self, deadline: float) -> None:
        assert self.other is not None
        self._outgoing.flush(deadline)
        self._outgoing.end(LinkEnded("the link was closed here", orderly=True))
        self.other._incoming.end(LinkEnded("the peer left", orderly=True), self._outgoing.frames)

    def cut(self) -> None:
        assert self.other is not None
        for end in (self, self.other):
            end._outgoing.end(LinkEnded("the peer is gone"))
            end._incoming.end(LinkEnded("the peer is gone"))

    def free(self) -> None:
        self._outgoing.close()
        self._incoming.close()


def shm_halves(
    thread: LoopThread, host: ShmHost, writer: Fault, reader: Fault, neighbours: int = 1
) -> tuple[ShmOutgoing, ShmIncoming]:
    """One direction: from rank 0, which fails with `writer`, to rank 1."""

    async def make() -> tuple[ShmOutgoing, ShmIncoming]:
        ticket = secrets.token_bytes(16)
        made: list[ShmIncoming] = []
        host.expect(ticket, made.append, reader, PEERS[0])
        return await connect(host.name, ticket, writer, PEERS[1], thread.loop, 5.0, neighbours), made[0]

    return thread.run(make())


@dataclass
class Halves:
    """One direction and the faults of its ends."""

    outgoing: ShmOutgoing
    incoming: ShmIncoming
    writer: Fault
    reader: Fault


@contextmanager
def halves(arena: Arena | None = None, neighbours: int = 1) -> Iterator[Halves]:
    """One direction; what is lent lies in this arena, what is copied in the share of so many neighbours."""
    writer, reader = Fault(1, 0, 0.05), Fault(1, 1, 0.05)
    with shm_host() as (thread, host):
        outgoing, incoming = shm_halves(thread, host, writer, reader, neighbours)
    if arena is not None:
        outgoing._arena = arena
        arena.watch(outgoing)
    try:
        yield Halves(outgoing, incoming, writer, reader)
    finally:
        outgoing.close()
        incoming.close()


def soon() -> float:
    """A deadline that only what hangs comes to."""
    return monotonic() + 10.0


def frame(payload: bytes | memoryview = b"", part: int = 0, signature: bytes = b"") -> Frame:
    """A frame of the halves' generation."""
    return Frame(FrameKind.DATA, 1, 5, part, signature, payload)


def in_arena(arena: Arena, nbytes: int, value: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """An array that can be lent, full of a value."""
    array = arena.empty((nbytes,), np.uint8)
    array[:] = value
    return array


def descriptors() -> int:
    """How many are open, once garbage is gone and the loop has seen to all that has happened so far."""

    async def some_turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    gc.collect()
    loop_thread().run(some_turns())
    return len(os.listdir("/proc/self/fd"))


def lent(nbytes: int) -> memoryview:
    """Memory that links of this process can lend."""
    return arena().empty(nbytes, np.uint8).data


@contextmanager
def shm_host() -> Iterator[tuple[LoopThread, ShmHost]]:
    """A host on the loop of this process."""
    thread = loop_thread()

    async def start() -> ShmHost:
        return ShmHost(thread.loop)

    async def stop() -> None:
        host.close()

    host = thread.run(start())
    try:
        yield thread, host
    finally:
        thread.run(stop())


@contextmanager
def shm_link_pair() -> Iterator[LinkPair]:
    """The two ends of a link, for `check_link`."""
    with shm_host() as (thread, host):
        fault_a, fault_b = Fault(1, 0, 0.05), Fault(1, 1, 0.05)
        a_to_b, b_from_a = shm_halves(thread, host, fault_a, fault_b)
        b_to_a, a_from_b = shm_halves(thread, host, fault_b, fault_a)
        a, b = ShmLink(PEERS[1], fault_a, a_to_b, a_from_b), ShmLink(PEERS[0], fault_b, b_to_a, b_from_a)
        a.other, b.other = b, a
        try:
            yield LinkPair(a, b, fault_a, fault_b, a.cut, empty=lent)
        finally:
            a.free()
            b.free()
