"""Parts of a view over gRPC: their links come and go, and nothing of them is left behind."""

import threading
import time

import numpy as np
import pytest

from paceline._group import Group
from paceline._links.base import Purpose
from paceline._links.grpc_mesh import GrpcMesh
from paceline.config import Config
from paceline.errors import PacelineError, PeerRaised
from paceline.testing import run_groups
from support.grpc_pair import grpc_world


def test_closed_subgroups_leave_no_links_behind() -> None:
    """A receiver that only listens dials too, late perhaps: that must not bring back what the other side has closed."""

    def rank(group: Group) -> tuple[int, int]:
        group.barrier()
        mesh = group._core.mesh
        assert isinstance(mesh, GrpcMesh)
        for i in range(30):
            part = group.subgroup([0, 1])
            assert part.scatter([np.array([i]), np.array([-i])] if group.rank == 0 else None)[0] in (i, -i)
            part.close()
            if i % 4 == 3:
                group.barrier()  # rank 0 only sends: otherwise it may be more groups ahead than the other one allows
        group.barrier()
        return len(mesh._links), len(mesh.fault._wakers)

    with grpc_world(max_early_groups=8) as world:
        groups = [Group(mesh, Config(failure_timeout=0.6)) for mesh in world.meshes]
        for links, wakers in run_groups(groups, rank):
            assert links <= 2
            assert wakers <= 4
        for group in groups:
            group.close(0.2)


def test_links_for_subgroups_not_yet_made_here_are_bounded() -> None:
    with grpc_world(max_early_groups=3) as world:
        group = Group(world.meshes[0], Config(failure_timeout=0.6))
        parts = [group.subgroup([0, 1], name=f"n{i}") for i in range(6)]
        for part in parts[:3]:
            part.send(np.ones(1), 1)
        parts[3]._core.mesh.link(1, Purpose.POINT_TO_POINT)  # knocks at the door
        with pytest.raises(PacelineError, match="too many groups"):
            group.recv(1, timeout=20.0)
        group.close(0.1)


def test_closing_a_subgroup_during_a_collective_raises_peer_raised() -> None:
    with grpc_world() as world:
        groups = [Group(mesh, Config(failure_timeout=0.6)) for mesh in world.meshes]
        part = groups[0].subgroup([0, 1])
        errors: list[PacelineError] = []

        def wait() -> None:
            try:
                part.all_reduce(np.ones(4))
            except PacelineError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while not part._core.progress().inside:
            time.sleep(0.001)
        part.close(0.05)
        thread.join(20.0)
        (error,) = errors
        assert isinstance(error, PeerRaised)
        assert error.ranks == (0,), "and nobody else's"
        for group in groups:
            group.close(0.1)
