"""gRPC links over real sockets keep the published rules of links."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from paceline._loop import loop_thread
from paceline.links.base import Purpose
from paceline.links.grpc_mesh import GrpcMesh
from paceline.testing import LinkPair, check_link
from support.grpc_pair import grpc_world


async def drop_streams(mesh: GrpcMesh) -> None:
    """Breaks what the mesh has dialled, behind its back: it has not closed anything itself."""
    for task in list(mesh._tasks):
        task.cancel()
    await asyncio.gather(*mesh._tasks, return_exceptions=True)
    for channel in mesh._channels.values():
        await channel.close(None)


@contextmanager
def grpc_pair() -> Iterator[LinkPair]:
    with grpc_world() as world:
        a = world.meshes[0].link(1, Purpose.COLLECTIVE)
        b = world.meshes[1].link(0, Purpose.COLLECTIVE)

        def cut() -> None:
            """What the death of a process does to its sockets: both streams end without a word."""
            loop_thread().run(drop_streams(world.meshes[1]))
            server = world.doors[1]._server
            assert server is not None
            loop_thread().run(server.stop(None))

        yield LinkPair(a, b, *world.faults, cut)


def test_grpc_links_keep_the_rules() -> None:
    check_link(grpc_pair)
