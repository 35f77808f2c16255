"""The share of memory that each link may take for copies."""

from __future__ import annotations

import pytest

from paceline.collectives.program import AHEAD, SEGMENT_BYTES
from paceline.links.base import Peer
from paceline.links.frame import MAX_SIGNATURE_BYTES, Frame, FrameKind, encode
from paceline.links.grpc_kind import OUTBOX_FRAMES
from paceline.links.nowhere import NoMesh
from paceline.links.shm.layout import STAGING_BYTES
from paceline.links.staging import (
    BUDGET_BYTES,
    LONG_FRAME_BYTES,
    LONG_FRAMES_AHEAD,
    LONGEST_FRAME_BYTES,
    LONGEST_FRAMES_AHEAD,
    STREAMED_BYTES,
    frame_bytes,
    staging_bytes,
)
from paceline.links.tcp._tcp_outgoing import MAX_WAITING_BYTES, MAX_WAITING_FRAMES
from paceline.links.tcp._tcp_wire import encode_head

MIB = 1 << 20


def test_all_links_keep_within_the_budget_and_each_holds_what_is_sent_ahead() -> None:
    for neighbours in range(1, 129):
        frame, staging = frame_bytes(neighbours), staging_bytes(neighbours)
        assert neighbours * staging <= BUDGET_BYTES
        assert staging <= STAGING_BYTES
        assert staging - frame >= (AHEAD + 1) * frame, "less than a frame is lost where the ring begins anew"


def test_the_link_of_two_members_holds_long_frames() -> None:
    """Less than one is lost where the ring begins anew."""
    assert staging_bytes(1) >= (LONG_FRAMES_AHEAD + 1) * LONG_FRAME_BYTES
    assert staging_bytes(1) >= (LONGEST_FRAMES_AHEAD + 1) * LONGEST_FRAME_BYTES


def test_a_threshold_tells_long_frames_from_all_others() -> None:
    """Whether it counts itself or not, and where a line is left out at each end (glibc has such ways to copy)."""
    assert frame_bytes(1) < STREAMED_BYTES <= LONG_FRAME_BYTES - 128
    assert LONG_FRAME_BYTES < LONGEST_FRAME_BYTES


@pytest.mark.parametrize("mib", range(16, 257, 4))
def test_what_longest_frames_leave_at_the_end_of_a_chunk_can_stream(mib: int) -> None:
    """Else it would be slow where cores share no cache, and half of 32 MiB with it."""
    assert STREAMED_BYTES + 128 <= mib * MIB % LONGEST_FRAME_BYTES <= LONG_FRAME_BYTES


def test_the_longest_frame_fits_every_link_with_the_longest_signature() -> None:
    frame = Frame(FrameKind.DATA, 1, 1, 0, bytes(MAX_SIGNATURE_BYTES), bytes(LONGEST_FRAME_BYTES))
    assert encode(frame)
    assert encode_head(frame)


def test_where_memory_is_not_shared_other_links_hold_as_much() -> None:
    assert MAX_WAITING_FRAMES >= AHEAD
    ahead = (AHEAD, frame_bytes(1)), (LONG_FRAMES_AHEAD, LONG_FRAME_BYTES), (LONGEST_FRAMES_AHEAD, LONGEST_FRAME_BYTES)
    assert max(frames * size for frames, size in ahead) <= MAX_WAITING_BYTES
    assert OUTBOX_FRAMES >= AHEAD


def test_few_ranks_have_the_frames_that_are_fastest() -> None:
    assert [frame_bytes(n) // MIB for n in (0, 1, 4)] == [2, 2, 2]
    assert frame_bytes(7) == SEGMENT_BYTES


@pytest.mark.parametrize(("nodes", "neighbours"), [((), 0), (("",) * 3, 0), (("a", "b"), 0), (("a", "b", "a", "a"), 2)])
def test_neighbours_are_those_of_the_fullest_node(nodes: tuple[str, ...], neighbours: int) -> None:
    mesh = NoMesh("for its peers")
    mesh.peers = tuple(Peer(rank, f"member-{rank}", "host", node=node) for rank, node in enumerate(nodes))
    assert mesh.neighbours == neighbours
