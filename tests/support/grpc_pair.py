"""Two gRPC meshes in one process, over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline._base.waits import loop_thread
from paceline._links.base import Peer
from paceline._links.fault import Fault
from paceline._links.grpc_door import Door, DoorLimits
from paceline._links.grpc_mesh import MAX_EARLY_GROUPS, GrpcMesh
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from paceline_protocol import OURS

__all__ = ["JOB", "GrpcWorld", "grpc_world"]

JOB = "pair"

_LIMITS = DoorLimits()


@dataclass
class GrpcWorld:
    """The members of one generation, each with a door of its own."""

    doors: list[Door]
    meshes: list[GrpcMesh]
    faults: list[Fault]

    def lose(self, rank: int) -> None:
        """What the death of its process does to a member's sockets: all its streams end without a word."""
        (server,) = self.doors[rank]._servers
        loop_thread().run(_drop_streams(self.meshes[rank]))
        loop_thread().run(server.stop(None))


async def _drop_streams(mesh: GrpcMesh) -> None:
    """Breaks what the mesh has dialled, behind its back: it has not closed anything itself."""
    for task in list(mesh._tasks):
        task.cancel()
    await asyncio.gather(*mesh._tasks, return_exceptions=True)
    for channel in mesh._channels.values():
        await channel.close(None)


@contextmanager
def grpc_world(
    world: int = 2,
    *,
    generation: int = 1,
    verdict_timeout: float = 0.05,
    kind: str = "grpc",
    streams: int = 1,
    limits: DoorLimits = _LIMITS,
    max_early_groups: int = MAX_EARLY_GROUPS,
) -> Iterator[GrpcWorld]:
    """Meshes of `world` members without a coordinator: what each raises is what it saw itself.

    Args:
        world: number of members.
        generation: its number.
        verdict_timeout: seconds, as for `Fault`.
        kind: of the links.
        streams: as in `Config`.
        limits: of each door.
        max_early_groups: as for `GrpcMesh`.
    """
    thread = loop_thread()
    config = Config(links=(kind,), tcp_streams=streams)
    doors = [Door(JOB, IN_THE_CLEAR, config, limits=limits) for _ in range(world)]
    ports = [thread.run(door.start("127.0.0.1", 0)) for door in doors]
    peers = [
        Peer(rank, f"member-{rank}", f"host-{rank}", f"127.0.0.1:{ports[rank]}", 100 + rank, "node")
        for rank in range(world)
    ]
    faults = [Fault(generation, rank, verdict_timeout) for rank in range(world)]
    meshes = [
        GrpcMesh(
            JOB,
            generation,
            OURS.newest,
            rank,
            peers,
            faults[rank],
            thread,
            3.0,
            IN_THE_CLEAR,
            doors[rank].kinds,
            max_early_groups=max_early_groups,
        )
        for rank in range(world)
    ]
    for door, mesh in zip(doors, meshes, strict=True):
        thread.loop.call_soon_threadsafe(door.enter, mesh)
    try:
        yield GrpcWorld(doors, meshes, faults)
    finally:
        for mesh in meshes:
            mesh.close(time.monotonic() + 1.0)
        for door in doors:
            thread.run(door.close())
