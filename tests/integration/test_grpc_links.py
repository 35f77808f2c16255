"""Links between members keep the published rules, whatever carries their frames."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic

import pytest

from paceline._links.base import LinkEnded, Purpose
from paceline._links.frame import Frame, FrameKind
from paceline._links.member_link import MemberLink
from paceline.testing import LinkPair, check_link
from support.grpc_pair import grpc_world
from support.shm_pair import lent


@contextmanager
def link_pair(kind: str, streams: int = 1) -> Iterator[LinkPair]:
    with grpc_world(kind=kind, streams=streams) as world:
        a = world.meshes[0].link(1, Purpose.COLLECTIVE)
        b = world.meshes[1].link(0, Purpose.COLLECTIVE)
        yield LinkPair(a, b, *world.faults, partial(world.lose, 1), empty=lent)


@pytest.mark.alone  # some rules say how soon
@pytest.mark.parametrize(("kind", "streams"), [("grpc", 1), ("tcp", 1), ("tcp", 4), ("shm", 1)])
def test_links_between_members_keep_the_rules(kind: str, streams: int) -> None:
    check_link(partial(link_pair, kind, streams))
    with link_pair(kind, streams) as pair:
        pair.a.send(Frame(FrameKind.DATA, pair.generation, 1, 0, b"", b"x"), monotonic() + 5)
        assert pair.b.recv(monotonic() + 5).payload == b"x"
        assert pair.a.kind == kind
        assert pair.a.mark(3, monotonic() + 5) == (kind == "shm")


@pytest.mark.parametrize("kind", ["grpc", "tcp", "shm"])
def test_nothing_is_sent_behind_the_last_word(kind: str) -> None:
    """Before the peer's answer too: it would be a frame more than was announced, and lost."""
    with link_pair(kind) as pair:
        frame = Frame(FrameKind.DATA, pair.generation, 1, 0, b"", b"x")
        pair.a.send(frame, monotonic() + 5)
        assert isinstance(pair.a, MemberLink)
        pair.a.half_close(FrameKind.CLOSE, monotonic() + 5)
        for send in (pair.a.send, pair.a.lend):
            with pytest.raises(LinkEnded) as caught:
                send(frame, monotonic() + 5)
            assert caught.value.orderly
        assert pair.b.recv(monotonic() + 5).payload == b"x"
        with pytest.raises(LinkEnded) as caught:
            pair.b.recv(monotonic() + 5)
        assert caught.value.orderly
        assert not pair.fault_b.failed
