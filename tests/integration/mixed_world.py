"""Members of one generation in one process, each on a node of its own choosing and with its own kinds of links.

with mixed_world([Place("a"), Place("a"), Place("b", links=("tcp",))]) as groups: ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from paceline._base.waits import loop_thread
from paceline._group import Group
from paceline._links.base import Peer
from paceline._links.fault import Fault
from paceline._links.grpc_door import Door, DoorLimits
from paceline._links.grpc_mesh import GrpcMesh
from paceline.config import LINKS, Config
from paceline.credentials import IN_THE_CLEAR, Credentials
from paceline_protocol import OURS

__all__ = ["MixedWorld", "Place", "kinds_of", "mixed_world", "run_all"]

T = TypeVar("T")

JOB = "mixed"

_LIMITS = DoorLimits()


@dataclass(frozen=True)
class Place:
    """Where a member is, and what it may use.

    Attributes:
        node: alike for those that may share memory; empty for a member that shares none.
        links: as in `Config`.
        streams: likewise, `tcp_streams`.
        credentials: what it shows and believes.
    """

    node: str = "node"
    links: tuple[str, ...] = LINKS
    streams: int = 1
    credentials: Credentials = IN_THE_CLEAR


@dataclass
class MixedWorld:
    """The members, by rank."""

    places: list[Place]
    doors: list[Door]
    meshes: list[GrpcMesh]
    groups: list[Group]


@contextmanager
def mixed_world(
    places: Sequence[Place],
    *,
    config: Config | None = None,
    prepare: Callable[[Door], object] = id,
    patience: float = 3.0,
    limits: DoorLimits = _LIMITS,
) -> Iterator[MixedWorld]:
    """Groups of a generation without a coordinator: what each raises is what it saw itself.

    Args:
        places: of the members, by rank.
        config: timeouts.
        prepare: does something to each door before anybody knocks.
        patience: seconds to knock at a door that does not answer.
        limits: of each door.
    """
    thread = loop_thread()
    timeouts = config or Config(failure_timeout=3.0)
    with ExitStack() as stack:
        doors, ports = [], []
        for place in places:
            own = Config(links=place.links, tcp_streams=place.streams)
            door = Door(JOB, place.credentials, own, limits=limits)
            stack.callback(_close, door)
            doors.append(door)
            ports.append(thread.run(door.start("127.0.0.1", 0)))
            prepare(door)
        peers = [
            Peer(rank, f"member-{rank}", f"host-{place.node}", f"127.0.0.1:{port}", 100 + rank, place.node)
            for rank, (place, port) in enumerate(zip(places, ports, strict=True))
        ]
        meshes = []
        for rank, (door, place) in enumerate(zip(doors, places, strict=True)):
            fault = Fault(1, rank, 0.05)
            mesh = GrpcMesh(JOB, 1, OURS.newest, rank, peers, fault, thread, patience, place.credentials, door.kinds)
            stack.callback(_close, mesh)
            meshes.append(mesh)
            thread.loop.call_soon_threadsafe(door.enter, mesh)
        groups = [Group(mesh, timeouts) for mesh in meshes]
        for group in groups:
            stack.callback(group.close, 0.2)
        yield MixedWorld(list(places), doors, meshes, groups)


def _close(made: Door | GrpcMesh) -> None:
    if isinstance(made, Door):
        loop_thread().run(made.close())
    else:
        made.close(time.monotonic() + 1.0)


def run_all(groups: Sequence[Group], fn: Callable[[Group], T], timeout: float = 30.0) -> list[T]:
    """What `fn(group)` gives on every rank, each in a thread of its own; the groups stay open."""
    with ThreadPoolExecutor(len(groups)) as pool:
        tasks = [pool.submit(fn, group) for group in groups]
        done, _ = wait(tasks, timeout, FIRST_EXCEPTION)
        failed = [task for task in tasks if task in done and task.exception() is not None]
        if failed or len(done) < len(tasks):  # end what the others wait for
            for group in groups:
                group.close(0.0)
        return [task.result() for task in failed or tasks]


def kinds_of(mesh: GrpcMesh, group: str = "") -> dict[int, str]:
    """By which kind of link a member has sent to whom."""
    return {
        rank: link.kind
        for (rank, _, name), link in mesh._links.items()
        if name == group and link in mesh._dialled and link.kind
    }
