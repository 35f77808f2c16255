"""What a member does when a peer has taken back what it was reading: the right one is blamed, and nobody else waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline._collectives.arithmetic import arithmetic, reduction
from paceline._collectives.engine import CollectiveCall, Engine
from paceline._collectives.program import all_reduce_program
from paceline._links.base import Link, LinkEnded, Peer, Purpose
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline.errors import PacelineError


class Lender(Link):
    """A link of which one frame can be read; or more, if the peer has taken it back."""

    kind = "fake"

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.taken_back = False
        self.released = self.sent = 0

    def send(self, frame: Frame, deadline: float) -> None:
        self.sent += 1

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        return Frame(FrameKind.DATA, 1, 1, 0, b"", bytes(8))

    def release(self) -> None:
        self.released += 1
        if self.taken_back:
            raise LinkEnded(f"{self.peer} took back the arrays that it had lent")

    def on_readable(self, notify: object) -> None:
        raise AssertionError("nobody asks")

    def close(self, deadline: float) -> None:
        """Nothing is to be done."""


class Part:
    """This member and others, as a part of a view: places are not ranks of the view."""

    generation, rank, neighbours = 1, 0, 0

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.peers = tuple(Peer(rank, f"m{rank}", "host") for rank in ranks)
        self.fault = Fault(1, ranks[0], 0.0)
        self.links = [Lender(peer) for peer in self.peers]

    @property
    def size(self) -> int:
        return len(self.peers)

    def link(self, peer: int, purpose: Purpose) -> Link:
        return self.links[peer]


@pytest.mark.parametrize("guilty", [1, 2, 3])
def test_a_peer_that_takes_back_its_array_is_accused_and_no_total_is_sent(guilty: int) -> None:
    """What others lent is released."""
    mesh: Any = Part((4, 6, 5, 7))
    engine = Engine(mesh, lambda operation: None)
    mesh.links[guilty].taken_back = True
    program = all_reduce_program("star", 0, 4, 2, 2)
    x, sums = np.ones(2, np.float32), arithmetic(reduction("sum", np.dtype("float32")), 4)
    with pytest.raises(PacelineError, match="took back"):
        engine.attempt(CollectiveCall(1, b"", 0.0, np.inf), lambda call: engine.run(call, program, x, x, sums))
    assert mesh.fault._suspicion.accused == mesh.peers[guilty].rank
    assert [link.released for link in mesh.links[1:]] == [1, 1, 1]
    assert [link.sent for link in mesh.links[1:]] == [0, 0, 0]
