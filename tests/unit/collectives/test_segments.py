"""How long the frames of a collective are: every link must have room for them, and all ranks must choose alike."""

from __future__ import annotations

import numpy as np
import pytest

from paceline._collectives.engine import Engine
from paceline._collectives.tasks import segment
from paceline._links.base import Peer
from paceline._links.faulty import FaultyMesh
from paceline._links.nowhere import NoMesh
from paceline._links.submesh import SubMesh

MIB = 1 << 20
FLOAT = np.dtype(np.float32)


def engine(nodes: str, members: tuple[int, ...] = ()) -> Engine:
    """Of a view with ranks on these nodes, a letter each; or of a part of it."""
    mesh = NoMesh("for its peers")
    mesh.rank = 0
    mesh.peers = tuple(Peer(rank, f"member-{rank}", "host", node=node) for rank, node in enumerate(nodes))
    return Engine(SubMesh(mesh, members, "part") if members else mesh, lambda number: None)


@pytest.mark.parametrize(
    ("nodes", "members", "frame"),
    [("aa", (), 2), ("aaa", (0, 1), 2), ("aaaaaaaa", (0, 1), 1), ("aabb", (), 1), ("aabb", (0, 1), 2), ("ab", (), 1)],
)
def test_frames_within_a_node_are_longer_where_links_have_room(
    nodes: str, members: tuple[int, ...], frame: int
) -> None:
    """A part of the view has links with the room that the view leaves them."""
    assert segment(FLOAT, engine(nodes, members)) * 4 == frame * MIB


def test_a_wrapping_mesh_reports_the_neighbors_of_the_inner_mesh() -> None:
    inner = engine("aaa", (0, 1)).mesh
    assert FaultyMesh(inner, lambda what, peer, frame: frame).neighbours == inner.neighbours == 2
