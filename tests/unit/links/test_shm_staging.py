"""The share of memory that each link may take for copies."""

from __future__ import annotations

import pytest

from paceline._collectives.program import AHEAD, SEGMENT_BYTES
from paceline._links.base import Peer
from paceline._links.nowhere import NoMesh
from paceline._links.outbox import OUTBOX_FRAMES
from paceline._links.shm.control_segment import STAGING_BYTES, frame_bytes, staging_bytes
from paceline._links.tcp._tcp_outgoing import MAX_WAITING_BYTES, MAX_WAITING_FRAMES

MIB = 1 << 20


def test_staging_fits_the_budget_and_holds_the_frames_sent_ahead() -> None:
    for neighbours in range(1, 129):
        frame, staging = frame_bytes(neighbours), staging_bytes(neighbours)
        assert neighbours * staging <= 48 * MIB
        assert staging <= STAGING_BYTES
        assert staging - frame >= (AHEAD + 1) * frame, "less than a frame is lost where the ring begins anew"


def test_tcp_and_grpc_queues_hold_the_frames_sent_ahead() -> None:
    assert MAX_WAITING_FRAMES >= AHEAD
    assert AHEAD * frame_bytes(1) <= MAX_WAITING_BYTES
    assert OUTBOX_FRAMES >= AHEAD


def test_few_ranks_per_node_use_frames_of_two_mib() -> None:
    assert [frame_bytes(n) // MIB for n in (0, 1, 4)] == [2, 2, 2]
    assert frame_bytes(7) == SEGMENT_BYTES


@pytest.mark.parametrize(("nodes", "neighbours"), [((), 0), (("",) * 3, 0), (("a", "b"), 0), (("a", "b", "a", "a"), 2)])
def test_neighbors_are_counted_on_the_fullest_node(nodes: tuple[str, ...], neighbours: int) -> None:
    mesh = NoMesh("for its peers")
    mesh.peers = tuple(Peer(rank, f"member-{rank}", "host", node=node) for rank, node in enumerate(nodes))
    assert mesh.neighbours == neighbours
