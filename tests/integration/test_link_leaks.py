"""Links that come and go, whole or broken in the middle of a transfer, leave nothing in a process that stays."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from paceline._base.waits import loop_thread
from paceline._group import Group
from paceline._links.base import Peer, Purpose
from paceline._links.fault import Fault
from paceline._links.grpc_door import Door, DoorLimits
from paceline._links.grpc_mesh import GrpcMesh
from paceline._links.shm.handover import ShmHost
from paceline._links.shm.shm_kind import ShmKind
from paceline._links.tcp import TcpHost, TcpKind
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from paceline.errors import PacelineError
from paceline_protocol import OURS
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GENERATIONS = 120
"""Each makes links both ways and loses them."""

MAPS = min(16 * (os.cpu_count() or 1) + 16, GENERATIONS // 2)
"""Mappings that may be more: two for each arena of glibc's malloc, up to 8 a core (mallopt(3)) once
so many threads have come and gone, and the stacks of threads that are kept. One a generation would be far more."""

TICKET_S = 1.0
"""For which a ticket is valid, in seconds: what links that were given up have left at the doors goes sooner."""


@dataclass(frozen=True)
class Taken:
    """What a process has of the system."""

    files: Counter[str]
    threads: Counter[str]
    shared: frozenset[str]
    segments: int

    @classmethod
    def now(cls) -> Taken:
        gc.collect()
        files: Counter[str] = Counter()
        for name in os.listdir("/proc/self/fd"):
            try:
                files[os.readlink(f"/proc/self/fd/{name}").partition(":[")[0]] += 1
            except FileNotFoundError:  # that of the listing
                continue
        maps = Path("/proc/self/maps").read_text()
        # Other processes have files there, which come and go.
        shared = frozenset(name for name in os.listdir("/dev/shm") if "paceline" in name)
        names = (thread.name.rstrip("0123456789") for thread in threading.enumerate())
        threads = Counter(name for name in names if name != "asyncio_")  # the loop's own for look-ups, six at most
        return cls(files, threads, shared, maps.count("memfd:paceline"))

    def beyond(self, other: Taken) -> list[object]:
        """Returns the entries that are only here, or are more than there."""
        more: list[object] = [*(self.files - other.files), *(self.threads - other.threads), *self.shared - other.shared]
        return more + [self.segments] * (self.segments > other.segments)


class Members:
    """Two members that stay, with their doors, while generations pass."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self._kind = kind
        self._thread = loop_thread()
        self._config = Config(links=(kind,), failure_timeout=3.0)
        limits = DoorLimits(ticket_s=TICKET_S)
        self._doors = [Door("leaks", IN_THE_CLEAR, self._config, limits=limits) for _ in range(2)]
        self._generation = 0
        ports = [self._thread.run(door.start("127.0.0.1", 0)) for door in self._doors]
        for door in self._doors:
            stack.callback(lambda door: self._thread.run(door.close()), door)
            for host in _hosts(door):
                host.limits = replace(host.limits, ticket_s=TICKET_S)
        self._peers = [Peer(n, f"m{n}", "host", f"127.0.0.1:{port}", 0, "node") for n, port in enumerate(ports)]
        self._pool = stack.enter_context(ThreadPoolExecutor(2))

    def pass_generation(self, end: Callable[[Members, list[Group], list[GrpcMesh]], None]) -> None:
        """Makes the links of one more, and ends it in some way."""
        self._generation += 1
        meshes = []
        for rank, door in enumerate(self._doors):
            fault = Fault(self._generation, rank, 0.02)
            mesh = GrpcMesh(
                "leaks",
                self._generation,
                OURS.newest,
                rank,
                self._peers,
                fault,
                self._thread,
                3.0,
                IN_THE_CLEAR,
                door.kinds,
            )
            meshes.append(mesh)
            self._thread.loop.call_soon_threadsafe(door.enter, mesh)
        groups = [Group(mesh, self._config) for mesh in meshes]
        end(self, groups, meshes)
        for group, mesh in zip(groups, meshes, strict=True):  # as a member does that goes on in the next
            group._core.bound.abandon()
            self._thread.run(mesh.end())

    def whole(self, groups: list[Group], meshes: list[GrpcMesh]) -> None:
        """A collective and messages, and a goodbye."""

        def work(group: Group) -> None:
            x = group.empty(300_000, np.float32)
            x[:] = group.rank
            assert group.all_reduce(x)[-1] == 1.0
            group.send(x, 1 - group.rank)
            assert group.recv(1 - group.rank)[0][-1] == 1 - group.rank
            group.close(5.0)

        list(self._pool.map(work, groups))
        for mesh in meshes:
            for link in mesh._dialled:
                assert link.kind == self._kind

    def cut(self, groups: list[Group], meshes: list[GrpcMesh]) -> None:
        """One side is gone in the middle of a transfer, without a word; the other has lent, and waits."""

        def work(group: Group) -> None:
            x = group.empty(2_000_000, np.float32)
            with pytest.raises(PacelineError):
                group.all_reduce(x)

        task = self._pool.submit(work, groups[0])
        link, other = meshes[1].link(0, Purpose.COLLECTIVE), meshes[0].link_from(1, Purpose.COLLECTIVE, "")
        link.release()  # this reader gives back what it has read, so it gets views
        frame = link.recv(time.monotonic() + 10.0)
        assert len(frame.payload) >= 1 << 20
        link.send(frame, time.monotonic() + 10.0)
        # Else nobody is told of its end: this member's door, unlike that of one that has died, stays open.
        assert other is not None
        wait_for(lambda: other._claimed)
        self._thread.run(meshes[1].end())
        task.result(10.0)

    def early(self, groups: list[Group], meshes: list[GrpcMesh]) -> None:
        """Given up while links are being made."""
        meshes[0].link(1, Purpose.POINT_TO_POINT)
        self._thread.run(meshes[0].end())

    def forgotten(self) -> bool:
        """True if nothing waits at the doors any more."""
        for door in self._doors:
            if door.kinds._come or any(host._expected or host._strangers for host in _hosts(door)):
                return False
        return True


def _hosts(door: Door) -> list[ShmHost | TcpHost]:
    """Where the halves of peers come in, beside the door itself."""
    return [kind.host for kind in door.kinds if isinstance(kind, ShmKind | TcpKind) and kind.host is not None]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.sampled(2)
def test_hundreds_of_joins_and_losses_leak_nothing(kind: str) -> None:
    """After some rounds, in which the interpreter and grpc take what they keep, no less than after hundreds."""
    ends = [Members.whole, Members.cut, Members.early, Members.cut]
    with ExitStack() as stack:
        members = Members(kind, stack)
        for number in range(40):
            members.pass_generation(ends[number % len(ends)])
        before = settled(members, None)
        maps = len(Path("/proc/self/maps").read_text().splitlines())
        for number in range(GENERATIONS):
            members.pass_generation(ends[number % len(ends)])
        after = settled(members, before)
        assert not after.beyond(before), f"{before} became {after}"
        assert len(Path("/proc/self/maps").read_text().splitlines()) <= maps + MAPS


def settled(members: Members, expected: Taken | None) -> Taken:
    """What is taken once nothing changes any more, or once it is no more than expected.

    grpc closes sockets when it comes to it.
    """
    deadline = time.monotonic() + 20.0
    last = Taken.now()
    quiet = 0
    while quiet < 20 and time.monotonic() < deadline:
        time.sleep(0.05)
        now = Taken.now()
        quiet = quiet + 1 if now == last and members.forgotten() else 0
        if expected is not None and not now.beyond(expected) and members.forgotten():
            return now
        last = now
    return last
