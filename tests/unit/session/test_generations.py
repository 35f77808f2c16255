"""What ends a member's generations: verdicts that come early or late, and the view after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline._links.base import Peer
from paceline._links.fault import Fault, Suspicion
from paceline._session.generations import Generations
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from paceline.errors import PeerLost, StaleGeneration
from paceline_protocol import Verdict
from paceline_protocol.messages import MemberList, ViewFormed
from paceline_protocol.translation import read_message
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.errors_pb2 import ErrorReason

PEERS = [Peer(0, "m0", "127.0.0.1:1")]


class Links:
    """A mesh without links."""

    def __init__(self, generation: int) -> None:
        self.generation, self.rank, self.retired = generation, 0, False
        self.fault = Fault(generation, 0, verdict_timeout=0.0)

    def retire(self) -> None:
        self.retired = True


def member(now: int | None = None, coming: int | None = None) -> Any:
    nothing: Any = None
    kinds: Any = SimpleNamespace(openings=lambda *_: None)
    generations: Any = Generations("job", Config(), nothing, IN_THE_CLEAR, kinds)
    generations.mesh = Links(now) if now is not None else None
    generations.coming = Links(coming) if coming is not None else None
    return generations


def verdict(generation: int) -> Verdict:
    return Verdict(generation, ErrorReason.ERROR_REASON_PEER_LOST, (1,), 7, "rank 1 died")


def test_a_verdict_ends_only_its_own_generation() -> None:
    generations = member(now=2)
    assert generations.settle(verdict(2))
    with pytest.raises(PeerLost, match="rank 1 died"):
        generations.mesh.fault.check()
    later = member(now=3)
    assert not later.settle(verdict(2))
    later.mesh.fault.check()


def test_a_verdict_ends_links_of_the_coming_generation() -> None:
    generations = member(now=2, coming=3)
    assert generations.settle(verdict(3))
    with pytest.raises(PeerLost, match="rank 1 died"):
        generations.coming.fault.check()
    generations.mesh.fault.check()


def test_an_early_verdict_applies_to_links_made_later() -> None:
    generations = member(now=2)
    generations.formed(3)
    assert not generations.settle(verdict(3))
    with pytest.raises(PeerLost, match="rank 1 died"):
        generations.make(ViewFormed(MemberList(3, 1), 0), PEERS).fault.check()


def test_a_verdict_on_a_superseded_view_is_dropped() -> None:
    generations = member(now=2)
    generations.settle(verdict(3))
    generations.formed(4)
    generations.make(ViewFormed(MemberList(4, 1), 0), PEERS).fault.check()


def test_a_formed_view_retires_the_previous_generation() -> None:
    """Its member may be in a step: it went on while the coordinator was away."""
    generations = member(now=2)
    generations.formed(3)
    assert generations.mesh.retired
    with pytest.raises(StaleGeneration, match="generation 3 has formed"):
        generations.mesh.fault.check()


def test_the_first_view_retires_no_generation() -> None:
    generations = member()
    generations.formed(1)
    assert generations.mesh is None


def test_a_relayed_suspicion_sends_a_heartbeat_instead_of_a_report() -> None:
    """The coordinator waits for its next heartbeat otherwise, and may take it for dead."""
    said: list[str] = []
    generations = member()
    generations._thread = SimpleNamespace(loop=SimpleNamespace(call_soon_threadsafe=lambda do: do()))
    control = SimpleNamespace(generation=3, beat=lambda: said.append("beat"), send=lambda _: said.append("report"))
    generations.control = control
    lost = ErrorReason.ERROR_REASON_PEER_LOST
    told = generations.make(ViewFormed(MemberList(3, 1), 0), PEERS)
    told.fault.suspect(Suspicion(lost, 1, 7, "the link ended", relayed=True))
    assert said == ["beat"]
    saw = generations.make(ViewFormed(MemberList(3, 1), 0), PEERS)
    saw.fault.suspect(Suspicion(lost, 1, 7, "the link ended"))
    assert said == ["beat", "report"]


@pytest.mark.parametrize(("told", "version"), [(9, 9), (8, 8), (0, 8)])
def test_links_use_the_protocol_version_of_the_view_or_8_by_default(told: int, version: int) -> None:
    response = pb.SessionResponse(view_formed=pb.ViewFormed(generation=3, world_size=1, protocol_version=told))
    view = read_message(response)
    assert isinstance(view, ViewFormed)
    assert member().make(view, PEERS).version == version
