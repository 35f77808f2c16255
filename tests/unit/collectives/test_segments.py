"""How long frames are, and how many go ahead: what each link has room for, and all ranks must choose alike."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.collectives.engine import Engine
from paceline.collectives.program import AHEAD
from paceline.collectives.tasks.task import long_segment, segment
from paceline.links.base import Peer
from paceline.links.faulty import FaultyMesh
from paceline.links.nowhere import NoMesh
from paceline.links.staging import LONG_FRAME_BYTES, LONGEST_FRAME_BYTES
from paceline.links.submesh import SubMesh

MIB = 1 << 20
FLOAT = np.dtype(np.float32)


def engine(nodes: str, members: tuple[int, ...] = ()) -> Engine:
    """Of a view with ranks on these nodes, a letter each; or of a part of it."""
    mesh = NoMesh("for its peers")
    mesh.rank = 0
    mesh.peers = tuple(Peer(rank, f"member-{rank}", "host", node=node) for rank, node in enumerate(nodes))
    return Engine(SubMesh(mesh, members, "part") if members else mesh, lambda number: None)


@pytest.mark.parametrize(
    ("nodes", "members", "frame", "long", "ahead"),
    [
        ("aa", (), 2, 4, 2),
        ("aaa", (), 2, 2, AHEAD),
        ("aaa", (0, 1), 2, 2, AHEAD),
        ("aabb", (), 1, 1, AHEAD),
        ("aabb", (0, 1), 2, 4, 2),
        ("ab", (), 1, 1, AHEAD),
    ],
)
def test_two_members_alone_on_a_node_send_long_frames(
    nodes: str, members: tuple[int, ...], frame: int, long: int, ahead: int
) -> None:
    """A part of the view has links with the room that the view leaves them."""
    of = engine(nodes, members)
    assert segment(FLOAT, of) * 4 == frame * MIB
    elements, sent_ahead = long_segment(FLOAT, 31 * MIB, of)
    assert (elements * 4, sent_ahead) == (long * MIB, ahead)


def test_frames_of_what_fits_no_cache_are_just_longer() -> None:
    """So that whoever reads them knows that they go past the caches, whatever is faster for others."""
    elements, sent_ahead = long_segment(FLOAT, 32 * MIB, engine("aa"))
    assert (elements * 4, sent_ahead) == (LONGEST_FRAME_BYTES, 1)
    assert LONGEST_FRAME_BYTES > LONG_FRAME_BYTES
    for nodes in ("aaa", "aabb", "ab"):
        assert long_segment(FLOAT, 32 * MIB, engine(nodes)) == (segment(FLOAT, engine(nodes)), AHEAD)


def test_a_mesh_around_another_has_its_neighbours() -> None:
    inner = engine("aaa", (0, 1)).mesh
    assert FaultyMesh(inner, lambda what, peer, frame: frame).neighbours == inner.neighbours == 2
