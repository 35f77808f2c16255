"""The two ends of a link over shared memory in one process, handed over as between two."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from unit.links.halves_link import MarkedLink

from paceline._base.waits import LoopThread, loop_thread
from paceline._links.base import Peer
from paceline._links.conformance import LinkPair
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline._links.shm.arena import Arena, arena
from paceline._links.shm.handover import ShmHost, ShmLimits, connect
from paceline._links.shm.incoming import ShmIncoming
from paceline._links.shm.outgoing import ShmOutgoing

__all__ = [
    "PEERS",
    "Halves",
    "descriptors",
    "frame",
    "halves",
    "in_arena",
    "lent",
    "shm_halves",
    "shm_host",
    "shm_link_pair",
]

PEERS = (Peer(0, "member-0", "host-0", pid=100), Peer(1, "member-1", "host-1", pid=101))


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
def shm_host(limits: ShmLimits | None = None) -> Iterator[tuple[LoopThread, ShmHost]]:
    """A host on the loop of this process."""
    thread = loop_thread()

    async def start() -> ShmHost:
        return ShmHost(thread.loop, limits=limits or ShmLimits())

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
        a = MarkedLink("shm", PEERS[1], a_to_b, a_from_b, fault_a)
        b = MarkedLink("shm", PEERS[0], b_to_a, b_from_a, fault_b)
        a.other, b.other = b, a
        try:
            yield LinkPair(a, b, fault_a, fault_b, a.cut, empty=lent)
        finally:
            a.free()
            b.free()
